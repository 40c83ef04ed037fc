"""How much the tokens that attention uses move from token to token: supports, their overlap, the mass they capture.

Pure tensor work on attention probabilities; imports nothing of ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

DISTANCES = (1, 2, 4, 8, 16, 32, 64)
"""Tokens between the token whose support it is and the later one."""
RELATIONS = ("within", "across", "from_end", "into_end")
"""How two tokens stand to sentence ends: see `relations`."""


def top_positions(probabilities: Tensor, k: int) -> Tensor:
    """The `k` most probable positions, int64 [..., k], of [..., positions]; ties go to the lower position."""
    return probabilities.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def relations(ends: Sequence[bool], distance: int) -> dict[str, Tensor]:
    """Which pairs (t, t + distance) stand in which relation; bool [tokens - distance] each, empty beyond the range.

    `ends[t]` says that token t ends a sentence. The relations:

    - `all`: every pair;
    - `within`: both inside one sentence, and neither ends it;
    - `across`: at least one sentence end lies between them, and neither is one;
    - `from_end`: t ends a sentence (so the later token is in another);
    - `into_end`: t + distance ends a sentence, its own or a later one.

    Each pair is in one of the last four, and in two if both tokens are ends.
    """
    ending = torch.tensor(list(ends), dtype=torch.bool)
    sentence = ending.long().cumsum(0)  # as the sentence of an end itself, this is never asked for
    pairs = max(len(ending) - distance, 0)
    before, after = ending[:pairs], ending[distance:]
    same = sentence[:pairs] == sentence[distance:]
    inside = ~before & ~after
    return {
        "all": torch.ones(pairs, dtype=torch.bool),
        "within": inside & same,
        "across": inside & ~same,
        "from_end": before,
        "into_end": after,
    }


class Track:
    """Supports of one layer's KV heads, compared with those of the tokens before; fed a few tokens at a time.

    Args:
        k: size of a support.
        distances: ascending; each token is compared with the one so many tokens before it.
        bins: parts of equal size (but for rounding) into which positions are grouped for `counts`; 0: none.

    Of all that it is fed it keeps the numbers below, and the supports of the last `distances[-1]` tokens.
    """

    def __init__(self, k: int, distances: Sequence[int] = DISTANCES, bins: int = 0) -> None:
        self.k, self.distances, self.bins = k, tuple(distances), bins
        self._past: Tensor | None = None
        self._overlap: dict[int, list[Tensor]] = {distance: [] for distance in self.distances}
        self._captured: dict[int, list[Tensor]] = {distance: [] for distance in self.distances}
        self._own: list[Tensor] = []
        self._mass: list[Tensor] = []
        self._counts: list[Tensor] = []
        self._unfilled: list[Tensor] = []

    def add(self, probabilities: Tensor) -> None:
        """The next tokens' probabilities, [tokens, heads, positions], over the same positions every time.

        They need not sum to one: masses are shares of what lies on these positions (0 where nothing does).
        """
        k, mass = self.k, probabilities.sum(-1)
        share = probabilities / mass.clamp_min(torch.finfo(mass.dtype).tiny)[..., None]
        chosen = top_positions(probabilities, k)
        held = torch.zeros_like(probabilities, dtype=torch.bool).scatter_(-1, chosen, True)
        supports = chosen.int() if self._past is None else torch.cat([self._past, chosen.int()])
        known, new = len(supports) - len(chosen), len(chosen)
        for distance in self.distances:
            # The first of the new tokens that has a known token so far before it.
            first = max(distance - known, 0)
            if first >= new:
                continue
            earlier = supports[known + first - distance : known + new - distance].long()
            self._overlap[distance].append(held[first:].gather(-1, earlier).sum(-1).double().cpu() / k)
            self._captured[distance].append(share[first:].gather(-1, earlier).sum(-1).double().cpu())
        self._past = supports[-self.distances[-1] :].clone()
        self._own.append(share.gather(-1, chosen).sum(-1).double().cpu())
        self._mass.append(mass.double().cpu())
        self._unfilled.append(((probabilities > 0).sum(-1) < k).cpu())
        if self.bins:
            where = chosen * self.bins // probabilities.shape[-1]
            held_in = torch.zeros(*where.shape[:-1], self.bins, device=where.device, dtype=torch.long)
            self._counts.append(held_in.scatter_add_(-1, where, torch.ones_like(where)).sum(1).cpu())

    def overlap(self, distance: int) -> Tensor:
        """|S_t ∩ S_t+distance| / k, float64 [tokens - distance, heads]."""
        return self._joined(self._overlap[distance])

    def captured(self, distance: int) -> Tensor:
        """Share of its mass that t + distance puts on S_t, float64 [tokens - distance, heads]."""
        return self._joined(self._captured[distance])

    def own(self, distance: int = 0) -> Tensor:
        """Share of its mass that t + distance puts on its own support, float64 [tokens - distance, heads]."""
        return torch.cat(self._own)[distance:]

    def mass(self) -> Tensor:
        """Probability on these positions, float64 [tokens, heads]."""
        return torch.cat(self._mass)

    def unfilled(self) -> Tensor:
        """Which supports hold positions of probability 0, for want of others; bool [tokens, heads]."""
        return torch.cat(self._unfilled)

    def counts(self) -> Tensor:
        """Positions of a bin that supports hold, summed over heads; int64 [tokens, bins]."""
        return torch.cat(self._counts)

    def _joined(self, parts: list[Tensor]) -> Tensor:
        return torch.cat(parts) if parts else torch.zeros(0, self._own[0].shape[1], dtype=torch.float64)


def bin_edges(positions: int, bins: int) -> list[int]:
    """First position of each bin of `Track.counts`, and after the last one `positions`; `bins + 1` numbers."""
    return [-(-index * positions // bins) for index in range(bins + 1)]


def summarise(tracks: Sequence[Track], ends: Sequence[bool]) -> list[dict[str, Any]]:
    """A row for each distance and relation: how many pairs, and mean and spread over pairs, layers and heads.

    Args:
        tracks: of the layers, all fed the same tokens.
        ends: as in `relations`.

    Returns:
        Rows with `distance`, `relation` ("all" or one of `RELATIONS`), `pairs` (of tokens), and `overlap`, `captured`,
        `own` as `spread` gives them.
    """
    rows = []
    for distance in tracks[0].distances:
        joined = {
            "overlap": torch.cat([track.overlap(distance) for track in tracks], 1),
            "captured": torch.cat([track.captured(distance) for track in tracks], 1),
            "own": torch.cat([track.own(distance) for track in tracks], 1),
        }
        for relation, which in relations(ends, distance).items():
            found = {name: spread(values[which]) for name, values in joined.items()}
            rows.append({"distance": distance, "relation": relation, "pairs": int(which.sum()), **found})
    return rows


def spread(values: Tensor) -> dict[str, float] | None:
    """`mean` and `std` (of the values themselves, not of their mean) of a tensor, rounded; None of nothing."""
    if not values.numel():
        return None
    return {"mean": round(values.mean().item(), 6), "std": round(values.std(correction=0).item(), 6)}
