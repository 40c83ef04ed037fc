"""Policies: their text, their scores against formulas written down literally, and what steps do with them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import sfi_compile
from sfi_compile import diagnostics, policies
from sfi_compile.config import Config, OptionError
from sfi_compile.kernels import reference, selector
from sfi_compile.policies import Evidence, Policy
from tests.decoders import BY_NAME
from tests.harness import FULL, SMALL, compiled, decode, dense_steps, eager_lowering, prompt
from tests.passes import toys

BASELINES = ("fresh", "h2o", "pyramidkv", "random", "reach", "snapkv", "streaming", "topk")


@policies.register
@dataclasses.dataclass(frozen=True)
class Earliest(Policy):
    """As a user would write one."""

    name: ClassVar[str] = "earliest"
    skip: int = 0
    weights: tuple[float, ...] = ()

    def scores(self, evidence: Evidence) -> Tensor:
        heads, size = evidence.keys.shape[:2]
        place = torch.arange(size, dtype=torch.float32).expand(heads, size)
        return torch.where(place < self.skip, torch.nan, -place)


# Text


def test_the_policies_there_are() -> None:
    assert set(policies.names()) >= {"sfi", *BASELINES}
    assert all(policies.parse(name).to_text() == name for name in policies.names())


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("topk", "topk"),
        (" random( seed = 3 ) ", "random(seed=3)"),
        ("random(seed=0)", "random"),
        (policies.Random(seed=-2), "random(seed=-2)"),
        (Earliest(skip=2, weights=(0.5, 1.0)), "earliest(skip=2,weights=(0.5,1.0))"),
    ],
)
def test_a_policy_survives_its_text(given: Any, text: str) -> None:
    config = Config.from_options({"policy": given})
    assert config.policy == text
    spec = config.selector()
    assert type(spec).from_text(spec.to_text()) == spec
    assert policies.parse(spec.policy).to_text() == text
    assert isinstance(given, str) or policies.parse(spec.policy) == given


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ("tops", ("'tops'", "allowed: ", "'topk'")),
        ("random(sed=3)", ("'random' has no 'sed'", "allowed: seed")),
        ("topk(k=3)", ("'topk' has no 'k'", "no fields")),
        ("random(seed=x)", ("seed is no number",)),
        ("random(seed=1.5)", ("seed is 1.5", "allowed: int")),
        ("random(3)", ("'random(3)' is no policy",)),
        ("reach(queries=64)", ("'reach' has no 'queries'", "allowed: fading, weight, ahead, decay")),
        ("reach(fading=1.5)", ("'reach'", "fading is 1.5", "allowed: a number >= 0 and <= 1")),
        ("reach(fading=-0.1)", ("fading is -0.1", "allowed: a number >= 0 and <= 1")),
        ("reach(weight=-1)", ("weight is -1.0", "allowed: a number >= 0 and <= 1e6")),
        ("reach(weight=1e999)", ("weight is inf", "allowed: a number >= 0 and <= 1e6")),
        ("reach(ahead=-1)", ("ahead is -1", "allowed: a whole number >= 0")),
        ("reach(ahead=1.5)", ("ahead is 1.5", "allowed: int")),
        ("reach(decay=1.5)", ("decay is 1.5", "allowed: a number >= 0 and <= 1")),
        ("h2o(decay=-0.1)", ("'h2o'", "decay is -0.1", "allowed: a number >= 0 and <= 1")),
        ("h2o(decay=2)", ("decay is 2.0", "allowed: a number >= 0 and <= 1")),
        ("h2o(decay='half')", ("decay is 'half'", "allowed: float")),
        ("pyramidkv(beta=0.5)", ("'pyramidkv'", "beta is 0.5", "allowed: a number >= 1")),
        ("pyramidkv(beta=1e999)", ("beta is inf", "allowed: a number >= 1")),
        ("pyramidkv(queries=0)", ("'pyramidkv'", "queries is 0", "allowed: a whole number >= 1")),
        ("pyramidkv(pool=4)", ("pool is 4", "allowed: an odd number >= 1")),
        ("snapkv(queries=0)", ("'snapkv'", "queries is 0")),
        ("snapkv(pool=4)", ("pool is 4", "allowed: an odd number >= 1")),
        ("top k", ("'top k' is no policy",)),
        ("", ("'' is no policy",)),
        (3, ("is 3", "a name, or a policy")),
        (None, ("is None", "a name, or a policy")),
    ],
)
def test_what_is_no_policy_is_refused(given: Any, parts: tuple[str, ...]) -> None:
    with pytest.raises(OptionError) as caught:
        Config.from_options({"policy": given})
    assert all(part in str(caught.value) for part in ("'policy'", *parts)), str(caught.value)


def test_what_chooses_at_every_step_is_slow_at_every_step() -> None:
    assert Config.from_options({"policy": "fresh"}).refresh_interval == 1
    assert Config.from_options({"policy": "fresh", "preset": "paper-quality"}).refresh_interval == 1
    with pytest.raises(OptionError, match="'refresh_interval' is 32; allowed: 1 with policy 'fresh'"):
        Config.from_options({"policy": "fresh", "refresh_interval": 32})


def test_what_cannot_be_registered() -> None:
    @dataclasses.dataclass
    class Thawed:
        name: ClassVar[str] = "thawed"

    @dataclasses.dataclass(frozen=True)
    class Bare(Policy):
        name: ClassVar[str] = "bare"
        width: int

    @dataclasses.dataclass(frozen=True)
    class Taken(Policy):
        name: ClassVar[str] = "topk"

    class Plain(policies.TopK):
        name: ClassVar[str] = "plain"

    for kind, message in (
        (Thawed, "no frozen dataclass"),
        (Bare, "fields without a default: width"),
        (Taken, "there is one of that name"),
        (Plain, "no frozen dataclass"),
        (Policy, "name is None"),
    ):
        with pytest.raises(ValueError, match=message):
            policies.register(kind)  # type: ignore[type-var]
    assert not {"thawed", "bare", "plain"} & {*policies.names()}


# Scores


def evidence(heads: int = 3, rows: int = 4, size: int = 40, seed: int = 0) -> Evidence:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(heads, rows, size, generator=generator)
    logits[..., -2:] = -torch.inf
    keys = torch.randn(heads, size, 8, generator=generator)
    candidates = torch.zeros(size, dtype=torch.bool)
    candidates[2:30] = True
    position = torch.zeros(size).masked_fill(~candidates, -torch.inf)
    return Evidence(logits, keys, candidates, position, Config().selector())


def chosen(policy: str, given: Evidence, k: int = 7) -> list[list[int]]:
    scores = policies.scores_of(policies.parse(policy), given)
    found: list[list[int]] = selector.top_k(scores, given.candidates, k).tolist()
    return found


def test_topk_takes_the_largest_mean_probability() -> None:
    given = evidence()
    for h, found in enumerate(chosen("topk", given)):
        mean = given.logits[h].double().softmax(-1).mean(0)
        ranked = sorted(given.candidates.nonzero().flatten().tolist(), key=lambda t: -float(mean[t]))
        assert found == sorted(ranked[:7])
    assert chosen("fresh", given) == chosen("topk", given)


def test_streaming_takes_the_latest() -> None:
    assert chosen("streaming", evidence()) == [[*range(23, 30)]] * 3


def test_random_differs_by_head_and_seed_alone() -> None:
    one, other = chosen("random", evidence()), chosen("random", evidence(seed=5))
    assert one == other
    assert one != chosen("random(seed=1)", evidence())
    assert one[0] != one[1]
    counts = torch.zeros(28)
    for seed in range(300):
        for of_head in chosen(f"random(seed={seed})", evidence(heads=1)):
            counts[torch.tensor(of_head) - 2] += 1
    # 75 expected for each position, 7.5 standard deviation.
    assert counts.sum() == 300 * 7
    assert (counts - 75).abs().max() < 5 * 7.5


def test_nan_comes_last_and_a_wrong_shape_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen("earliest(skip=3)", evidence()) == [[*range(3, 10)]] * 3
    assert chosen("earliest(skip=27)", evidence(heads=1)) == [[2, 3, 4, 5, 27, 28, 29]]
    monkeypatch.setattr(Earliest, "scores", lambda self, given: torch.zeros(3))
    with pytest.raises(ValueError, match=r"'earliest' gave scores of shape \(3,\); allowed: \(3, 40\)"):
        chosen("earliest", evidence())


# Steps


@pytest.mark.parametrize("policy", ["sfi", *BASELINES, "earliest"])
def test_slow_steps_are_dense_and_so_is_a_memory_of_everything(policy: str) -> None:
    llama = BY_NAME["llama"]
    model, _ = llama.build()
    ids, fed = prompt(2, 20), prompt(2, 12, 1)
    for options, exact in ((FULL, True), (SMALL, False)):
        options = {key: value for key, value in options.items() if policy != "fresh" or key != "refresh_interval"}
        with eager_lowering():
            ours = decode(llama, model, compiled(model, **options, policy=policy), ids, 12, 40, fed, keep_caches=True)
        dense = dense_steps(llama, model, ours, 20, torch.float32)
        off = (ours.logits[:, 1:] - dense).abs().amax((0, 2)).tolist()
        for difference, kind in zip(off, ours.kinds, strict=True):
            if exact or (kind == "slow" and policy != "fresh"):
                assert difference < 1e-4
        if policy == "fresh":
            assert set(ours.kinds) == {"slow"}
            assert exact or min(off) > 1e-3
        else:
            assert ours.kinds.count("fast") >= 8
        assert sfi_compile.stats().refreshes >= 2 * ours.kinds.count("slow")


def test_a_fresh_step_attends_to_what_it_has_just_chosen() -> None:
    """Of two rows; and to everything where no memory may be kept: the third attends to what is not finite."""
    given = toys.operands(batch=3, query_heads=4, kv_heads=2, size=24, dim=4, at=21)
    given[4][2, :, 3] = torch.nan

    def grouped(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
        return toys.SDPA(q, keys, values, attn_mask=toys.written(k, v, keys, values, pos), enable_gqa=True)

    recorded = toys.record(grouped, *given)
    options = {"policy": "fresh", "sink": 1, "recent": 3, "k_head": 5, "refresh_interval": 1}
    work = toys.compiled(recorded.module, "lower", **options)
    held = toys.state(work, slow=True)
    out = work.variants[0](*recorded.fresh(), *held)[0]
    q, k, v, keys, values, _ = given
    for b in range(3):
        k_all, v_all = keys[b].clone(), values[b].clone()
        k_all[:, 21], v_all[:, 21] = k[b, :, 0], v[b, :, 0]
        mask = (torch.arange(24) <= 21)[None, None]
        logits = reference.logits(q[b], k_all, mask, 0.5)
        cand = reference.candidates(mask[0, 0], 21, 1, 3)
        best = [reference.best(of_head.softmax(-1).mean(0), cand, 5) for of_head in logits]
        spec = Config.from_options(options).selector()
        support = reference.support(mask[0, 0], 21, best, spec)
        wanted = reference.attention(q[b], k_all, v_all, mask, 0.5, None if b == 2 else support)
        torch.testing.assert_close(out[b].double(), wanted, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert out[2].isnan().any()


# Queries of earlier tokens


def test_earlier_queries_against_literal_loops() -> None:
    """A ring of four, of which the sequence's own are asked; two query heads a KV head, masked tokens, a softcap."""
    torch.manual_seed(0)
    heads, kv_heads, width, size, dim, at, started = 4, 2, 4, 12, 8, 9, 7
    q = torch.randn(size, 1, heads, 1, dim, dtype=torch.float64)
    keys = torch.randn(1, kv_heads, size, dim, dtype=torch.float64)
    ring = torch.full((1, heads, width, dim), torch.nan, dtype=torch.float64)
    for position in range(3, at + 1):
        torch.ops.sfi.remember(q[position], torch.tensor([position]), ring)
    mask = torch.arange(size) <= at
    mask[4] = False
    own = reference.logits(q[at][0], keys[0], mask[None, None], 0.3, 5.0)[None].float()
    for first in (started, 0):
        Witness.seen.clear()
        frame = torch.where(torch.arange(size) < 6, 0.0, -torch.inf)[None].float()
        spec = Config.from_options({"policy": "witness", "k_head": 3, "sink": 0}).selector().to_text()
        rows, status = torch.tensor([True]), torch.tensor([0])
        extent, begun = torch.tensor([[at, at + 1, 0]]), torch.tensor([first])
        asked = (own, keys, rows, status, extent, frame, spec, 0.3, 5.0, ring, torch.tensor([at]), begun)
        torch.ops.sfi.select(*asked)
        [found] = Witness.seen
        earlier = [p for p in range(at - width + 1, at) if p >= first]
        assert found.shape == (kv_heads, 2 * (1 + len(earlier)), at + 1)
        assert Witness.ages[-1] == [0, 0, *([at - p for p in earlier] * 2)]
        for h in range(kv_heads):
            wanted = [own[0, h, r, : at + 1].tolist() for r in range(2)]
            for r in range(2):
                for p in earlier:
                    raw = [float(q[p, 0, 2 * h + r, 0] @ keys[0, h, t]) * 0.3 for t in range(at + 1)]
                    sees = [t <= p and t != 4 for t in range(at + 1)]
                    capped = [5 * math.tanh(x / 5) if s else -math.inf for x, s in zip(raw, sees, strict=True)]
                    wanted.append(capped)
            torch.testing.assert_close(found[h], torch.tensor(wanted), rtol=1e-5, atol=1e-5)
    # What saw nothing of what this step sees is no evidence, and spoils nothing.
    Witness.seen.clear()
    near = own.masked_fill(torch.arange(size) < 8, -torch.inf)
    torch.ops.sfi.select(near, *asked[1:])
    [found] = Witness.seen
    assert (found[:, [2, 3, 5, 6]] == -torch.inf).all()
    assert found[:, [4, 7], at - 1].isfinite().all()


@policies.register
@dataclasses.dataclass(frozen=True)
class Witness(Policy):
    """Keeps what it is shown."""

    name: ClassVar[str] = "witness"
    seen: ClassVar[list[Tensor]] = []
    ages: ClassVar[list[list[int] | None]] = []

    def scores(self, evidence: Evidence) -> Tensor:
        self.seen.append(evidence.logits.clone())
        self.ages.append(None if evidence.ages is None else evidence.ages.tolist())
        return evidence.log_probabilities.logsumexp(1)


@pytest.mark.parametrize("tokens", [1, 3])
def test_queries_of_a_step_of_several_tokens_have_ages_without_earlier_ones(tokens: int) -> None:
    def step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, pos: Tensor) -> Tensor:
        keys.index_copy_(2, pos, k)
        values.index_copy_(2, pos, v)
        mask = torch.arange(keys.shape[2]) <= pos[:, None]
        return toys.SDPA(q, keys, values, attn_mask=mask[None, None], enable_gqa=True)

    q, k = torch.randn(1, 2, tokens, 4), torch.randn(1, 1, tokens, 4)
    recorded = toys.record(step, q, k, k, *torch.randn(2, 1, 1, 8, 4), torch.arange(7 - tokens, 7))
    work = toys.compiled(recorded.module, "verify", policy="witness")
    Witness.ages.clear()
    work.variants[0](*recorded.fresh(), *toys.state(work, slow=True))
    assert Witness.ages == ([None] if tokens == 1 else [[2, 1, 0, 2, 1, 0]])


def test_queries_of_earlier_steps_are_evidence_until_the_text_changes() -> None:
    llama = BY_NAME["llama"]
    model, _ = llama.build()
    Witness.seen.clear()
    sites, group = llama.sites, model.config.num_attention_heads // model.config.num_key_value_heads
    with eager_lowering():
        forward = compiled(model, **SMALL, policy="witness", evidence_window=5)
        for _ in range(2):  # the second text, in a cache of its own, knows nothing of the first
            run = decode(llama, model, forward, prompt(2, 20), 18, 40)
            slow = [i for i, kind in enumerate(run.kinds) if kind == "slow"]
            assert slow == [0, 8, 16]
            counts = [x.shape[1] // group for x in Witness.seen]
            assert counts == [n for i in slow for n in [min(i + 1, 5)] * 2 * sites]
            Witness.seen.clear()


@pytest.mark.parametrize("policy", ["snapkv", "pyramidkv"])
def test_snapkv_pools_the_attention_of_its_window(policy: str) -> None:
    assert Config.from_options({"policy": policy}).evidence_window == 32
    assert Config.from_options({"policy": f"{policy}(queries=4)", "evidence_window": 8}).evidence_window == 8
    given = evidence()
    for h, found in enumerate(chosen(f"{policy}(pool=5)", given)):
        mean = given.logits[h].double().softmax(-1).mean(0)
        pooled = [float(mean[max(t - 2, 0) : t + 3].max()) for t in range(len(mean))]
        worth = sorted(given.candidates.nonzero().flatten().tolist(), key=lambda t: (-pooled[t], t))
        assert sorted(pooled[t] for t in found) == pytest.approx(sorted(pooled[t] for t in worth[:7]), rel=1e-5)


def test_streaming_holds_the_first_and_the_last_tokens() -> None:
    llama = BY_NAME["llama"]
    model, _ = llama.build()
    with eager_lowering():
        decode(llama, model, compiled(model, **SMALL, policy="streaming"), prompt(1, 30), 1, 40)
    [runner] = diagnostics.runners
    for name, held in runner.state.items():
        if name.startswith("sfi_held"):
            for of_head in held[0].tolist():
                assert sorted(t for t in of_head if t >= 0) == [0, 1, *range(31 - 6 - 8, 31)]


def test_a_policy_derived_from_one_with_kernels_has_none_unless_it_says_so() -> None:
    """Its own scores would be another policy's on a GPU."""

    class Renamed(policies.H2O):
        pass

    class Scored(policies.H2O):
        def scores(self, evidence: Evidence) -> Tensor:
            return -super().scores(evidence)

    class Added(policies.TopK):
        def accumulated(self, history: Tensor, attention: Tensor, tokens: int) -> Tensor:
            return attention

    class Said(Scored):
        @property
        def attended(self) -> policies.Attended:
            return policies.Attended(per_step=0.5)

    assert policies.attended_of(Renamed()) == policies.Attended()
    assert policies.attended_of(Scored()) is policies.attended_of(Added()) is None
    assert policies.attended_of(Said()) == policies.Attended(per_step=0.5)
    assert policies.attended_of(policies.Sfi()) is None


def test_a_query_that_may_attend_to_nothing_says_nothing() -> None:
    logits = torch.zeros(1, 2, 4)
    logits[0, 0], logits[0, 1, 2] = -torch.inf, 3.0
    keys, every = torch.zeros(1, 4, 2), torch.ones(4, dtype=torch.bool)
    given = Evidence(logits, keys, every, torch.zeros(4), Config().selector())
    assert int(policies.scores_of(policies.TopK(), given).argmax()) == 2
