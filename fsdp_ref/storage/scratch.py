"""Short-lived flat buffers without the price of fresh pages each time.

From a small pool. A gradient that is being exchanged needs two buffers of the unit's size for some milliseconds, in
every unit of every step; taking them from the operating system each time costs more than filling them.
"""

from __future__ import annotations

import torch
from torch import Tensor


class ScratchPool:
    """Keeps a few flat tensors for reuse; what is taken has undefined content and belongs to the taker.

    Only memory of the host is kept: a device's own allocator reuses memory too, and knows of streams.

    The pool never holds more free bytes than ``spare`` times the largest buffer ever asked for, so that it grows
    with the largest unit and not with the number of units.

    Attributes:
        free_bytes: bytes kept for reuse.
    """

    def __init__(self, spare: int = 3) -> None:
        self._spare = spare
        self._largest_bytes = 0
        self.free_bytes = 0
        self._free: dict[tuple[int, torch.dtype, torch.device], list[Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a flat tensor of exactly ``numel`` elements with undefined content."""
        if device.type != "cpu":
            return torch.empty(numel, dtype=dtype, device=device)
        kept = self._free.get((numel, dtype, device))
        if kept:
            buffer = kept.pop()
            self.free_bytes -= buffer.nbytes
            return buffer
        buffer = torch.empty(numel, dtype=dtype, device=device)
        self._largest_bytes = max(self._largest_bytes, buffer.nbytes)
        return buffer

    def give(self, buffer: Tensor) -> None:
        """Hand a taken buffer back; nobody may use it afterwards."""
        if buffer.device.type != "cpu":
            return
        if self.free_bytes + buffer.nbytes > self._spare * self._largest_bytes:
            self._drop_others(buffer)
        if self.free_bytes + buffer.nbytes <= self._spare * self._largest_bytes:
            self._free.setdefault((buffer.numel(), buffer.dtype, buffer.device), []).append(buffer)
            self.free_bytes += buffer.nbytes

    def _drop_others(self, buffer: Tensor) -> None:
        """Make room by forgetting buffers of other sizes: sizes come in turns, the newest is needed soonest."""
        wanted = (buffer.numel(), buffer.dtype, buffer.device)
        for key in [key for key in self._free if key != wanted]:
            self.free_bytes -= sum(kept.nbytes for kept in self._free.pop(key))
