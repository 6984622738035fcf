"""Where do shards and reduced gradients live while nobody computes with them?

At home: on the device of computation, or with offload on the host, where the optimizer then runs. Copies between the
two do not block the host; who waits for them stands in ``comm.streams`` (``host_after_prepare``, ``host_after_reduce``).
"""

from __future__ import annotations

import torch
from torch import Tensor


def send_home(shard_S: Tensor, device: torch.device, *, offload: bool) -> Tensor:
    """Return a new shard at its home, for a unit that computes on ``device``."""
    if not offload:
        return shard_S.to(device)
    at_home = shard_S.to("cpu")
    # The device reads pinned memory by itself; from other memory the host would copy, and wait.
    return at_home.pin_memory() if device.type == "cuda" else at_home


def fetch(shard_S: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the shard where and in the dtype that it is gathered in; the shard itself where both are right already.

    The copy may still be under way when this returns. The shard must not be written to until the host has waited.
    """
    return shard_S.to(device, dtype, non_blocking=True)


def send_gradient_home(grad_S: Tensor, home: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a reduced gradient at the shard's home; the host reads it only after waiting for its stream."""
    return grad_S.to(home, dtype, non_blocking=True)
