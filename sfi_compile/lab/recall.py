"""How much of dense attention a memory would still catch, by the tokens since it was made. Imports torch and the lab.

While passages are decoded, `Recorder` notes what every memory held when it was made; afterwards the dense model runs
over the same tokens, and what it attends to is summed over those positions, and over those that were appended since.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sfi_compile.lab.decode import prefill
from sfi_compile.lab.errors import LabError
from sfi_compile.lab.probabilities import probabilities_of, tokens_at_once
from sfi_compile.lab.reference import Reference

log = logging.getLogger("sfi_compile")


class NoRecallError(LabError):
    """The layers that give probabilities are not the sites, one for one."""


class Recorder:
    """What the memories of some rows held at every step: four bytes for each position of each memory made."""

    def __init__(self) -> None:
        self.made: list[list[int | None]] = []
        """By step and row: the position at which the memory was made; None: there is none."""
        self.held: dict[tuple[int, int], list[Tensor]] = {}
        """By row and that position: of each site, int32 [Hkv, S] on the CPU, -1 for empty slots."""

    def add(self, made: Sequence[int | None], held: Sequence[Tensor]) -> None:
        """Note a step.

        Args:
            made: of each row, as above.
            held: of each site, positions in the memory, int64 [B, Hkv, S].
        """
        self.made.append(list(made))
        for row, at in enumerate(made):
            if at is not None and (row, at) not in self.held:
                self.held[row, at] = [site[row].to("cpu", torch.int32, copy=True) for site in held]

    def caught(self, probabilities: Tensor, site: int, first: int) -> Tensor:
        """The share of attention that lies on what the memory of a site held, [B, T], mean over the KV heads.

        Args:
            probabilities: [B, T, Hkv, N], of dense attention, of steps from `first` on.
            site: its number.
            first: the number of the first of these steps.

        Returns:
            NaN where there was no memory. In the step that made it: of the memory that it made.

        Raises:
            NoRecallError: the site's memories are of other heads, or of more positions.
        """
        found = torch.full(probabilities.shape[:2], torch.nan)
        for row, attended in enumerate(probabilities):
            made = [step[row] for step in self.made[first : first + len(attended)]]
            for at in {at for at in made if at is not None}:
                steps = [i for i, own in enumerate(made) if own == at]
                mass = attended[steps]
                held = self.held[row, at][site]
                if len(held) != mass.shape[1] or held.max() >= mass.shape[2]:
                    raise NoRecallError(f"site {site} has other heads or positions than layer {site}")
                held = held.to(mass.device, torch.int64).expand(len(steps), -1, -1)
                kept = mass.gather(-1, held.clamp_min(0)).masked_fill(held < 0, 0.0).sum(-1)
                # Nobody attends to positions to come, so these are the ones appended since.
                kept += mass[..., at + 1 :].sum(-1)
                share = kept / mass.sum(-1).clamp_min(torch.finfo(mass.dtype).tiny)
                found[row, steps] = share.mean(-1).cpu()
        return found

    def by_age(self, caught: Tensor, context: int, lengths: Sequence[int]) -> list[list[float | None]]:
        """Means over the steps of a row, by tokens since its memory was made, from 0; None where no step is as old.

        Args:
            caught: [B, steps], of `caught`, mean over the sites.
            context: position of the first step.
            lengths: of each row, how many of the steps are its own; the others do not count.
        """
        found: list[list[float | None]] = []
        for b, row in enumerate(caught.tolist()):
            of_age: dict[int, list[float]] = {}
            for i, (made, value) in enumerate(zip(self.made[: lengths[b]], row, strict=False)):
                at = made[b]
                if at is not None:
                    of_age.setdefault(context + i - at, []).append(value)
            most = max(of_age, default=-1)
            means = [sum(of_age[age]) / len(of_age[age]) if age in of_age else None for age in range(most + 1)]
            found.append([None if x is None else round(x, 6) for x in means])
        return found


def recalls(
    model: Any,
    cache: Any,
    reference: Reference,
    recorder: Recorder,
    sites: int,
    advance: Callable[[int], None] = lambda steps: None,
) -> list[list[float | None]] | None:
    """Of each row, how much of dense attention its memory caught, by tokens since it was made, mean over the layers.

    Args:
        model: the model, uncompiled; it attends eagerly meanwhile.
        cache: a static cache that the passages fit into; it is written to.
        reference: the passages.
        recorder: what the memories held at the steps of these passages.
        sites: attention sites of the compiled model.
        advance: called with how many steps are done.

    Returns:
        None, and a line in the log, where the layers that give probabilities are not the sites, one for one, or where
        memory does not suffice.
    """
    batch, positions = len(reference.tokens), max(layer.keys.shape[2] for layer in cache.layers)
    at_once = tokens_at_once(model, batch, positions)
    caught, start, layers = torch.zeros(reference.tokens.shape), 0, 0

    def catch(_: int, probabilities: Tensor) -> None:
        nonlocal layers
        if layers == sites:
            raise NoRecallError(f"more layers than the {sites} sites give their attention")
        piece = slice(start, start + probabilities.shape[1])
        caught[:, piece] += recorder.caught(probabilities, layers, start) / sites
        layers += 1

    reference.restore(cache)
    try:
        with probabilities_of(model, None, positions, catch):
            for start in range(0, reference.steps, at_once):
                layers = 0
                prefill(model, reference.tokens[:, start : start + at_once], cache, advance)
                if layers != sites:
                    raise NoRecallError(f"{layers} layers give their attention, and there are {sites} sites")
    except (LabError, RuntimeError) as error:  # torch's errors, want of memory among them: what was measured stays
        log.warning("no recall: %s", error)
        return None
    return recorder.by_age(caught, reference.context, reference.lengths)
