"""The reference with faults that no number shows: memory that stays, gathers and reductions that nobody needs."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from typing import Any

from torch import nn

from fsdp_ref.handle.flat_handle import FlatHandle
from fsdp_ref.runtime.grad_sync import GradSync
from fsdp_ref.storage.flat_buffer import FlatBuffer
from fsdp_testing.adapters import registry
from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.museum.planting import instead, planting


def _with(name: str, plant: Any) -> Adapter:
    """The composable reference, with a fault while one of its models is in use."""
    sound = registry.load("fsdp_ref-composable")
    planted = ExitStack()

    def wrap(module: nn.Module, setup: Any) -> nn.Module:
        planted.close()
        planted.enter_context(plant())
        return sound.wrap(module, setup)

    def finish(model: nn.Module) -> None:
        planted.close()
        sound.finish(model)

    return dataclasses.replace(sound, name=name, wrap=wrap, finish=finish)


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


#: Units say that they are free, and their storage keeps its memory.
NEVER_FREED = _with("NEVER_FREED", planting((FlatBuffer, "free", instead(lambda original, buffer: None))))
#: Each gather is made twice; the second one is not reported and its result dropped.
GATHERS_TWICE = _with("GATHERS_TWICE", planting((FlatHandle, "start_unshard", instead(_gather_twice))))
#: Each reduction brings two more.
REDUCES_MORE = _with("REDUCES_MORE", planting((GradSync, "reduce", instead(_reduce_twice))))
