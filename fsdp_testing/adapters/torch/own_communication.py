"""Communication of a user's own, as FSDP2 takes it in place of its collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import DeviceMesh

from fsdp_testing.errors import InvalidImplementation

# `all_gather_into_tensor` before torch 2.13.
_ALL_GATHER: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Gather:
    """An all-gather of the user's own."""

    calls = 0
    """How often it was called."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for a message."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **how: Any) -> Any:
        self.calls += 1
        return _ALL_GATHER(output_tensor, input_tensor, **how)


class Reduce(Gather):
    """A reduce-scatter of the user's own, of a unit that its own all-gather has gathered."""

    def __init__(self, gather: Gather, hook: Callable[..., Any]) -> None:
        self.gather, self.hook = gather, hook

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **how: Any) -> None:
        if not self.gather.calls:
            raise InvalidImplementation("torch-fsdp2: expected the all-gather that was set to be called, got none.")
        self.hook(input_tensor, output_tensor)


def over_replicas(mesh: DeviceMesh, reduced: torch.Tensor) -> None:
    """What a user's function has to do beside sharding over a part of the ranks. Collectives: an all-reduce over replicas."""
    dist.all_reduce(reduced, group=mesh.get_group("replicate"))
    reduced.div_(mesh.size(0))
