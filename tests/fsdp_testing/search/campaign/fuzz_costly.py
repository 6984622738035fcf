"""The reference with faults that no number shows: memory that stays, gathers and reductions that nobody needs."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from planting import instead, planting, with_fault

from fsdp_ref.handle.flat_handle import FlatHandle
from fsdp_ref.runtime.grad_sync import GradSync
from fsdp_ref.storage.memory import FlatBuffer
from fsdp_testing.adapters import registry
from fsdp_testing.adapters.adapter import Adapter, TorchStyle


def _gather_twice(original: Any, handle: FlatHandle) -> Any:
    started = original(handle)
    if started and handle.sharded:
        again = handle.full_F().clone()
        handle.gather_into(again, handle.shard_S.to(handle.compute_dtype))
    return started


def _reduce_twice(original: Any, sync: GradSync, unit: Any, local: Any) -> None:
    handle = unit.handle
    if handle is not None and handle.groups.shard_size > 1:
        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.zeros(64))
        dist.all_reduce(torch.zeros(64))
    original(sync, unit, local)


REFERENCE = "fsdp_ref-composable"

#: Units say that they are free, and their storage keeps its memory.
NEVER_FREED = with_fault(
    "fsdp_ref-composable", planting((FlatBuffer, "free", instead(lambda original, buffer: None))), "NEVER_FREED"
)
#: Each gather is made twice; the second one is not reported and its result dropped.
GATHERS_TWICE = with_fault(
    "fsdp_ref-composable", planting((FlatHandle, "start_unshard", instead(_gather_twice))), "GATHERS_TWICE"
)
#: Each reduction brings two more.
REDUCES_MORE = with_fault(REFERENCE, planting((GradSync, "reduce", instead(_reduce_twice))), "REDUCES_MORE")

_REFERENCE = registry.load(REFERENCE)
#: Full parameters are gathered for it, from the pieces that it shows.
GATHERED_FOR = Adapter.of(
    TorchStyle(
        **{
            field.name: getattr(_REFERENCE, field.name)
            for field in fields(TorchStyle)
            if field.name != "full_parameters"
        }
    )
)
