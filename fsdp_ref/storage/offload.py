"""The place of shards and reduced gradients while nobody computes with them.

At home: on the device of computation, or with offload on the host, where the optimizer then runs. Copies between the
two do not block the host; who waits for them stands in ``comm.streams`` (``host_after_copies``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor


def pins_memory(device: torch.device) -> bool:
    """Return whether ``device`` reads and writes pinned memory of the host by itself."""
    return device.type not in {"cpu", "meta"} and _pinned_exists(device.type)


@cache
def _pinned_exists(device_type: str) -> bool:
    try:
        torch.empty(1, pin_memory=True)
    except (RuntimeError, NotImplementedError):
        return False  # an accelerator whose allocator of pinned memory nobody registered: copies block the host
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
