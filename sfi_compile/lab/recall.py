"""How much of dense attention a memory would still catch, by the tokens since it was made. Imports the lab only.

While passages are decoded, `Recorder` notes what every memory held when it was made; afterwards the dense model runs
over the same tokens, and what it attends to is summed over those positions, and over those that were appended since.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Recorder:
    """What the memories of some rows held at every step."""

    def __init__(self) -> None:
        self.made: list[list[int | None]] = []
        """By step and row: the position at which the memory was made; None: there is none."""
        self.held: dict[tuple[int, int], list[Tensor]] = {}
        """By row and that position: of each site, int64 [Hkv, S] on the CPU, -1 for empty slots."""

    def add(self, made: Sequence[int | None], held: Sequence[Tensor]) -> None:
        """Note a step.

        Args:
            made: of each row, as above.
            held: of each site, positions in the memory, int64 [B, Hkv, S].
        """
        self.made.append(list(made))
        for row, at in enumerate(made):
            if at is not None and (row, at) not in self.held:
                self.held[row, at] = [site[row].to("cpu", copy=True) for site in held]

    def caught(self, probabilities: Tensor, site: int, first: int) -> Tensor:
        """The share of attention that lies on what the memory of a site held, [B, T], mean over the KV heads.

        Args:
            probabilities: [B, T, Hkv, N], of dense attention, of steps from `first` on.
            site: its number.
            first: the number of the first of these steps.

        Returns:
            NaN where there was no memory. In the step that made it: of the memory that it made.
        """
        found = torch.full(probabilities.shape[:2], torch.nan)
        for row, attended in enumerate(probabilities):
            made = [step[row] for step in self.made[first : first + len(attended)]]
            for at in {at for at in made if at is not None}:
                steps = [i for i, own in enumerate(made) if own == at]
                mass = attended[steps]
                held = self.held[row, at][site].to(mass.device).expand(len(steps), -1, -1)
                kept = mass.gather(-1, held.clamp_min(0)).masked_fill(held < 0, 0.0).sum(-1)
                # Nobody attends to positions to come, so these are the ones appended since.
                kept += mass[..., at + 1 :].sum(-1)
                share = kept / mass.sum(-1).clamp_min(torch.finfo(mass.dtype).tiny)
                found[row, steps] = share.mean(-1).cpu()
        return found

    def by_age(self, caught: Tensor, context: int) -> list[list[float | None]]:
        """Means over the steps of a row, by tokens since its memory was made, from 0.

        Args:
            caught: [B, steps], of `caught`, mean over the sites.
            context: position of the first step.
        """
        ages = [[None if at is None else context + i - at for at in made] for i, made in enumerate(self.made)]
        most = max((age for row in ages for age in row if age is not None), default=-1)
        found: list[list[float | None]] = []
        for b, row in enumerate(caught.tolist()):
            of_age: list[list[float]] = [[] for _ in range(most + 1)]
            for i, value in enumerate(row):
                age = ages[i][b]
                if age is not None:
                    of_age[age].append(value)
            found.append([round(sum(x) / len(x), 6) if x else None for x in of_age])
        return found
