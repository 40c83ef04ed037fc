"""What the host tells the device before a slow step: which rows are slow, what they start from. Imports `capture`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sfi_compile.capture import captured


class Announcement:
    """Numbers by row, from the host into state tensors that never move.

    Values of one type go over together, in one pinned tensor; on a GPU, copies out of it are one captured graph. It is
    captured the second time.

    Args:
        batch: rows.
        told: state tensors [batch] by name, one for each device.
        zeroed: state tensors that become zero whenever something is told.
    """

    def __init__(self, batch: int, told: Mapping[str, tuple[Tensor, ...]], zeroed: tuple[Tensor, ...]) -> None:
        self.told, self.zeroed = told, zeroed
        names: dict[torch.dtype, list[str]] = {}
        for name, states in told.items():
            names.setdefault(states[0].dtype, []).append(name)
        pinned = any(states[0].is_cuda for states in told.values())
        # The device has read these when the next step's guard has its answer; nothing is told before that.
        self.host = [
            (alike, torch.empty(len(alike), batch, dtype=dtype, pin_memory=pinned)) for dtype, alike in names.items()
        ]
        every = [*zeroed, *(state for states in told.values() for state in states)]
        self.device = every[0].device if len({t.device for t in every}) == 1 and every[0].is_cuda else None
        self.times = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def tell(self, values: Mapping[str, Sequence[int]]) -> None:
        """Write `values` [batch], by name; names that are not told are left out."""
        for names, host in self.host:
            host.copy_(torch.tensor([values[name] for name in names]))
        self.times += 1
        if self.device is not None and self.graph is None and self.times > 1:
            self.graph = captured(self.device, self._write)
        if self.graph is None:
            self._write()
        else:
            self.graph.replay()

    def _write(self) -> None:
        for names, host in self.host:
            for name, row in zip(names, host, strict=True):
                for state in self.told[name]:
                    state.copy_(row, non_blocking=True)
        for state in self.zeroed:
            state.zero_()
