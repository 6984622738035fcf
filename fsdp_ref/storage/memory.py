"""The memory of full parameters, of buffers that live for a moment, and of shards at home.

A :class:`FlatBuffer` is one flat tensor whose storage is freed and refilled in place: the tensor object, and every view of it,
outlives its memory. That is what lets autograd and modules hold views of parameters while the bytes are gone (the mechanism of
FSDP's flat parameter; Source: Zhao et al., "PyTorch FSDP", section 4.2).

A gradient that is being exchanged needs two buffers of the unit's size for some milliseconds, in every unit of every step;
taking them from the operating system each time costs more than filling them. They come from a small :class:`ScratchPool`.

Shards and reduced gradients are at home while nobody computes with them: on the device of computation, or with offload on the
host, where the optimizer then runs. Copies between the two do not block the host; who waits for them stands in ``comm.streams``
(``host_after_copies``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from fsdp_ref.compat import storage_key


class FlatBuffer:
    """One flat tensor that is allocated only while it is needed.

    Attributes:
        tensor: the flat tensor; reading it while it is not allocated is undefined behaviour.
        key: what identifies its storage.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        # A buffer first needed under inference_mode() must still serve training later.
        with torch.inference_mode(False):
            self.tensor: Tensor = torch.empty(numel, dtype=dtype, device=device)
        self._nbytes = numel * self.tensor.element_size()
        self._storage = self.tensor.untyped_storage()
        self.key = storage_key(self.tensor)
        self._storage.resize_(0)

    @property
    def allocated(self) -> bool:
        """Whether the storage has its memory (a buffer of no elements always has)."""
        return self._storage.size() == self._nbytes

    def allocate(self) -> None:
        """Allocate the memory, with undefined content; nothing happens if it is already allocated."""
        if not self.allocated:
            self._storage.resize_(self._nbytes)

    def free(self) -> None:
        """Free the memory; nothing happens if it is already freed."""
        if self._nbytes and self.allocated:
            self._storage.resize_(0)


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
        """Give a taken buffer back; do not use it afterwards."""
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


def pins_memory(device: torch.device) -> bool:
    """Return whether ``device`` reads and writes pinned memory of the host by itself."""
    return device.type not in {"cpu", "meta"} and _pinned_exists(device.type)


@cache
def _pinned_exists(device_type: str) -> bool:
    try:
        torch.empty(1, pin_memory=True)
    except (RuntimeError, NotImplementedError):
        return False  # an accelerator without a registered allocator of pinned memory: copies block the host
    return True


def upload(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a few values on a device, without stopping the host: from memory of other kinds it would wait for its copy."""
    return torch.tensor(values, dtype=dtype, pin_memory=pins_memory(device)).to(device, non_blocking=True)


def another_home(shard_S: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy of a shard at its home in ``dtype``, in memory of the same kind."""
    copied = shard_S.detach().to(dtype, copy=True)
    return copied.pin_memory() if shard_S.is_pinned() else copied


def send_home(shard_S: Tensor, device: torch.device, *, offload: bool) -> Tensor:
    """Return a new shard at its home, for a unit that computes on ``device``."""
    if not offload:
        return shard_S.to(device)
    at_home = shard_S.to("cpu")
    # The device reads pinned memory by itself; from other memory the host would copy, and wait.
    return at_home.pin_memory() if pins_memory(device) else at_home


def fetch(shard_S: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the shard where and in the dtype that it is gathered in; the shard itself where both are right already.

    The copy may still be under way when this returns. The shard must not be written to until the host has waited.
    """
    return shard_S.to(device, dtype, non_blocking=True)


def send_gradient_home(grad_S: Tensor, home: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a reduced gradient at the shard's home; the host reads it only after waiting for its stream."""
    return grad_S.to(home, dtype, non_blocking=True)
