"""What a policy is: how a slow step ranks the tokens that a memory may hold. Imports torch, `config` and
`kernels.attended`.

A policy is one file, one frozen dataclass, one method. Its fields are its numbers, and graphs carry it as text, so they
are of the plain kinds that Python writes and reads back: numbers, strings, booleans, and tuples of them.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from sfi_compile.config import SelectorSpec
from sfi_compile.kernels.attended import Attended


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What a refresh of one row knows at one site: H KV heads, R evidence rows (query heads of a group times queries of
    the step, then of the tokens before it if there is an `evidence_window`), N positions, keys of width D."""

    logits: Tensor
    """float32 [H, R, N], the site's own; -inf where masked, which can be all of a row."""
    keys: Tensor
    """[H, N, D]; off the candidates they may hold anything, NaN included."""
    candidates: Tensor
    """bool [N]: what may be selected. Sinks and the recent segment are kept in any case, and are not among them."""
    log_position: Tensor
    """float32 [N]: the term of `sfi`'s prior that depends on the place alone."""
    spec: SelectorSpec
    """The options that a refresh depends on."""
    history: Tensor | None = None
    """float32 [H, N]: what the slow steps of this sequence have attended to, this one's included, of a policy that
    `keeps_history`."""
    values: Tensor | None = None
    """[H, N, Dv] of a policy that `reads_values`; off the candidates they may hold anything, NaN included."""
    ages: Tensor | None = None
    """int64 [R]: how many tokens ago each evidence row's query was; 0 for the step's last. None: all are 0."""

    @property
    def log_probabilities(self) -> Tensor:
        """Log of each evidence row's attention, float32 [H, R, N]; -inf of one that may attend to nothing."""
        found = self.logits.log_softmax(-1)
        return torch.where(found.isnan(), -torch.inf, found)

    @property
    def log_attention(self) -> Tensor:
        """Log of what all evidence rows together attend to a position with, float32 [H, N]: the order of their mean."""
        return self.log_probabilities.logsumexp(1)


@dataclasses.dataclass(frozen=True)
class Policy:
    """Base of all policies."""

    name: ClassVar[str]
    """What `policy=` in the options says."""
    reads_memory: ClassVar[bool] = False
    """Whether a slow step, too, attends to the memory, to the one that it has just filled, and not to everything."""
    keeps_history: ClassVar[bool] = False
    """Whether sites keep a `history` of attention: 4 bytes for each position and KV head."""
    reads_values: ClassVar[bool] = False
    """Whether a refresh looks at the values, too."""
    reads_spec: ClassVar[bool] = True
    """Whether it looks at the options of the paper's selector (`Evidence.spec`, `Evidence.log_position`), which are
    refused with one that does not."""

    @property
    def window(self) -> int:
        """Queries of the last so many tokens that it wants to see, at least (`evidence_window`)."""
        return 1

    def budget(self, site: int, sites: int, k_head: int, context: int) -> int:
        """Most tokens chosen per KV head at one site; more than the context count as the context.

        Their mean over the sites should be `k_head`: that is what the cost model counts with.

        Args:
            site: its number, from 0, in the order in which the step computes them.
            sites: how many there are.
            k_head: of the options.
            context: positions that the site's cache holds.
        """
        return k_head

    @property
    def attended(self) -> Attended | None:
        """The numbers of its score if that, and its history, are as `Attended` says: GPUs have kernels for those.

        A class that says otherwise what its scores are, or what is added, must say this anew.
        """
        return None

    def accumulated(self, history: Tensor, attention: Tensor, tokens: int) -> Tensor:
        """The history after one more slow step.

        Args:
            history: float32 [H, N], before it; zeros where a sequence begins.
            attention: float32 [H, N], the step's own: probabilities, summed over the query heads of a group and the
                queries of the step. Queries of earlier tokens are not among them, so that none counts twice.
            tokens: how many the sequence has gone on since the last slow step of this row, this step's included; 0
                where it begins.
        """
        return history + attention

    def scores(self, evidence: Evidence) -> Tensor:
        """How much each position is wanted: [H, N], of which `k_head` candidates of each head are taken, the largest
        first, ties to the lower position. -inf: last. Of positions that are no candidates, nobody asks."""
        raise NotImplementedError

    def refuse(self, field: str, allowed: str) -> None:
        """For `__post_init__`: raise a ValueError that names a field, its value and what is allowed."""
        raise ValueError(f"policy {self.name!r}: {field} is {getattr(self, field)!r}; allowed: {allowed}")

    def to_text(self) -> str:
        """`name`, or `name(field=value, …)` for fields that differ from their defaults; without blanks."""
        fields = dataclasses.fields(self)
        given = [f"{f.name}={getattr(self, f.name)!r}" for f in fields if getattr(self, f.name) != f.default]
        return (self.name + (f"({','.join(given)})" if given else "")).replace(" ", "")


_known: dict[str, type[Policy]] = {}
P = TypeVar("P", bound=type[Policy])


def register(policy: P) -> P:
    """Make a policy known by its name, as a decorator of its class.

    Raises:
        ValueError: it is no frozen dataclass, has no name, or the name of another class.
    """
    name = getattr(policy, "name", None)
    parameters = getattr(policy, "__dataclass_params__", None)
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"policy {policy.__name__}: name is {name!r}; allowed: letters, digits and underscores")
    if "__dataclass_params__" not in vars(policy) or parameters is None or not parameters.frozen:
        raise ValueError(f"policy {name!r}: {policy.__name__} is no frozen dataclass")
    bare = [f.name for f in dataclasses.fields(policy) if f.default is dataclasses.MISSING]
    if bare:
        raise ValueError(f"policy {name!r}: fields without a default: {', '.join(bare)}")
    other = _known.get(name)
    if other is not None and (other.__module__, other.__qualname__) != (policy.__module__, policy.__qualname__):
        raise ValueError(f"policy {name!r}: there is one of that name, {other.__module__}.{other.__qualname__}")
    _known[name] = policy
    parse.cache_clear()
    return policy


def names() -> list[str]:
    """Of all policies that are registered, sorted."""
    return sorted(_known)


@functools.lru_cache(maxsize=64)
def parse(text: str) -> Policy:
    """The policy that `to_text` wrote, or that a user did.

    Raises:
        ValueError: no such policy, with those there are, or a value that it does not take.
    """
    try:
        call = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        call = None
    if isinstance(call, ast.Name):
        call = ast.Call(call, [], [])
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise ValueError(f"{text!r} is no policy; allowed: a name, or name(field=value, …)")
    if call.func.id not in _known:
        raise ValueError(f"there is no policy {call.func.id!r}; allowed: {', '.join(map(repr, names()))}")
    kind = _known[call.func.id]
    fields = [f.name for f in dataclasses.fields(kind)]
    values = {}
    for keyword in call.keywords:
        if keyword.arg not in fields:
            raise ValueError(
                f"policy {kind.name!r} has no {keyword.arg!r}; allowed: {', '.join(fields) or 'no fields'}"
            )
        try:
            values[keyword.arg] = ast.literal_eval(keyword.value)
        except ValueError:
            raise ValueError(f"policy {kind.name!r}: {keyword.arg} is no number, string or tuple") from None
    for field in dataclasses.fields(kind):
        value = values.get(field.name, field.default)
        if isinstance(field.default, float) and type(value) is int:
            values[field.name] = value = float(value)
        if type(value) is not type(field.default):
            allowed = type(field.default).__name__
            raise ValueError(f"policy {kind.name!r}: {field.name} is {value!r}; allowed: {allowed}")
    return kind(**values)


def attended_of(policy: Policy) -> Attended | None:
    """`Policy.attended`, if whoever says that says also what the scores and the history are: a class derived from a
    policy that has kernels, with scores of its own, has none."""
    order = type(policy).__mro__

    def says(name: str) -> int:
        return next(i for i, kind in enumerate(order) if name in vars(kind))

    newest = says("attended") <= min(says("scores"), says("accumulated"))
    return policy.attended if newest else None


def budget_of(policy: Policy, site: int, sites: int, k_head: int, context: int) -> int:
    """The budget of a site, as `Policy.budget`.

    Raises:
        ValueError: the policy gave no whole number of at least one.
    """
    found = policy.budget(site, sites, k_head, context)
    if type(found) is not int or found < 1:
        raise ValueError(f"policy {policy.name!r} gave site {site} a budget of {found!r}; allowed: whole numbers >= 1")
    return found


def scores_of(policy: Policy, evidence: Evidence) -> Tensor:
    """Scores of the candidates, float32 [H, N]: what `top_k` takes. NaN counts as -inf.

    Raises:
        ValueError: the policy's scores have another shape.
    """
    found = policy.scores(evidence).float()
    heads, size = evidence.keys.shape[:2]
    if found.shape != (heads, size):
        raise ValueError(f"policy {policy.name!r} gave scores of shape {tuple(found.shape)}; allowed: {(heads, size)}")
    numbers = found.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    return torch.where(evidence.candidates, numbers, -torch.inf)
