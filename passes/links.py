"""Between product and product: where scores come from, and where they and the weights go. Analysis only.

A link passes logits or weights on, element by element or regrouped: casts, scales, masks, views. It keeps every token's
own; a softmax is none, and neither is a product.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

from torch import fx

from sfi_compile.passes.dataflow import mutated_arguments
from sfi_compile.passes.products import is_product, order_of
from sfi_compile.passes.shapes import CAT, SAME, is_pointwise, name_of, shape_of

CASTS = frozenset("to float half double bfloat16 type type_as".split())
REGROUPS = frozenset(["view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze"])


_SOFTMAXES = ("softmax", "safe_softmax", "log_softmax", "special_softmax", "special_log_softmax", "softmin")


def is_link(node: fx.Node) -> bool:
    """Whether a node passes logits or weights on."""
    return is_pointwise(node) or name_of(node) in (*REGROUPS, *SAME, *CAT) or order_of(node) is not None


def is_softmax(node: fx.Node) -> bool:
    """Whether a node is a softmax, over whatever axis, its logarithm, or that of the negative."""
    return node.op in ("call_function", "call_method") and name_of(node).strip("_") in _SOFTMAXES


def reduced(node: fx.Node) -> tuple[fx.Node, int] | None:
    """What a softmax is taken of, and over which axis; None if it does not say, or leaves logarithms."""
    source = node.args[0] if node.args else node.kwargs.get("input")
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", node.kwargs.get("axis"))
    shape = shape_of(source) if isinstance(source, fx.Node) else None
    if shape is None or not isinstance(source, fx.Node) or not isinstance(dim, int):
        return None
    return (source, dim % len(shape)) if "log" not in name_of(node) or _is_raised(node) else None


def _is_raised(logarithm: fx.Node) -> bool:
    """Whether logarithms become weights."""
    frontier, seen = [logarithm], {logarithm}
    while frontier:
        users = [user for user in frontier.pop().users if user not in seen and is_link(user)]
        if any(name_of(user).strip("_") in ("exp", "exp2") for user in users):
            return True
        seen.update(users)
        frontier += users
    return False


def softmax_input(node: fx.Node) -> fx.Node | None:
    """The operand of a softmax over the last axis; None for any other node."""
    is_plain = is_softmax(node) and "log" not in name_of(node) and name_of(node) != "softmin"
    found = reduced(node) if is_plain else None
    return found[0] if found is not None and found[1] == len(shape_of(found[0]) or ()) - 1 else None


def products_above(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The products that values are computed from through links alone."""
    frontier = list(nodes)
    seen, found = set(frontier), set()
    while frontier:
        node = frontier.pop()
        if is_product(node):
            found.add(node)
        elif is_link(node):
            frontier += [n for n in node.all_input_nodes if n not in seen]
            seen.update(node.all_input_nodes)
    return found


def products_below(softmax: fx.Node) -> list[tuple[list[fx.Node], fx.Node]]:
    """Every product that a softmax reaches through links: the nodes down to it, and the product."""
    frontier, found = [[softmax]], []
    seen: set[fx.Node] = set()
    while frontier:
        links = frontier.pop()
        for user in links[-1].users:
            if is_product(user):
                found.append((links, user))
                continue
            sliced = user.target is operator.getitem and user.args[0] is links[-1]
            idle = "dropout" in name_of(user) or _only_zeroes(user)
            if user not in seen and (is_link(user) or sliced or idle):
                seen.add(user)
                frontier.append([*links, user])
    return found


def _only_zeroes(node: fx.Node) -> bool:
    """`nan_to_num` of weights: it makes zeros of the NaN of a query that may attend to nothing."""
    given = dict(zip(("input", "nan", "posinf", "neginf"), node.args, strict=False)) | dict(node.kwargs)
    return name_of(node) == "nan_to_num" and given.get("nan") in (None, 0)


def fate(product: fx.Node) -> str:
    """Where scores go through links alone: "softmax", else "product", else "output", else ""."""
    frontier, seen, found = [product], {product}, {""}
    while frontier:
        for user in frontier.pop().users:
            if is_softmax(user):
                return "softmax"
            if user.op == "output" or is_product(user):
                found.add(user.op if user.op == "output" else "product")
            elif user not in seen and (is_link(user) or name_of(user) == "normalize"):  # weights, without a softmax
                seen.add(user)
                frontier.append(user)
    return max(found, key=["", "output", "product"].index)


def escapes(links: tuple[fx.Node, ...], output: fx.Node) -> fx.Node | None:
    """Something beside the chain's own output that needs its scores or weights; None if there is nothing."""
    chain = set(links)
    frontier = [user for link in links if link is not output for user in link.users if user not in chain]
    seen = set(frontier)
    while frontier:
        node = frontier.pop()
        if node.op == "output" or mutated_arguments(node):
            return node
        new = [user for user in node.users if user not in chain and user not in seen]
        seen.update(new)
        frontier += new
    return None
