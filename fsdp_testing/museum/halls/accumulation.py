"""Bugs of what several backward passes, or several parts of one, add up to."""

from __future__ import annotations

from typing import Any

import torch

from fsdp_ref.handle import gradients
from fsdp_ref.handle.gradients import GradientStore
from fsdp_ref.runtime import backward, forward, grad_sync
from fsdp_testing.museum.exhibit import Exhibit
from fsdp_testing.museum.planting import instead, planting, replaced, skipped


def _as_plain_torch(_original: Any, param: Any, value: Any) -> None:
    param.grad = value


def _anew(original: Any, unit: Any, root: Any) -> Any:
    unit.graph.forget()
    return original(unit, root)


def _overwrites(original: Any, self: Any, grad_S: Any) -> None:
    """Instead of `GradientStore.add_reduced`: what was added earlier in the same backward is gone."""
    kept = vars(self)
    if kept.get("_added_in_pass"):
        self.absorb()
        self.reduced_S = kept["_before_pass"]
    else:
        kept["_added_in_pass"] = True
        kept["_before_pass"] = None if self.reduced_S is None else self.reduced_S.clone()
    original(self, grad_S)


def _ends_pass(original: Any, self: Any) -> None:
    """Instead of `GradientStore.publish`, beside `_overwrites`: the next backward begins."""
    vars(self)["_added_in_pass"] = False
    original(self)


def _kept_stays_in_replica(original: Any, self: Any, unit: Any, handle: Any, grads: Any) -> None:
    kept_F = handle.grads.take_local() if handle.groups.replicate is not None and handle.sharded else None
    original(self, unit, handle, grads)
    if kept_F is None:
        return
    dtype = handle.precision.reduce
    out_S = torch.empty(handle.shard_map.shard_numel, dtype=dtype)
    sent_F = kept_F.to(dtype).div_(handle.groups.total_size)
    handle.collectives.reduce_scatter(out_S, sent_F, handle.groups.shard, "kept gradient").wait()
    handle.grads.add_reduced(out_S)


def _not_for_offloaded(original: Any, self: Any) -> None:
    if self.local_F is not None and self._handle.config.offload:
        raise RuntimeError("attempting to assign a gradient of size '[_]' to a tensor of another size")
    original(self)


def _result_is_dropped(original: Any, self: Any, unit: Any, handle: Any, grads: Any) -> None:
    with replaced(unit, "comm_hook", _on_copies):
        original(self, unit, handle, grads)


def _on_copies(hook: Any) -> Any:
    return lambda state, *tensors: hook(state, *(tensor.clone() for tensor in tensors))


EXHIBITS = (
    Exhibit(
        id="B002",
        title="a gradient of no_sync is put on a sharded parameter",
        story="Under no_sync the gradient has the shape of the whole parameter, while the parameter shows its shard: "
        "installing it like any other gradient is refused by torch.",
        source="pytorch PR 90546",
        plant=planting((gradients, "set_grad", instead(_as_plain_torch))),
        checks=("accumulation.no_sync_then_reduced",),
        silent=False,
    ),
    Exhibit(
        id="B031",
        title="a gradient of no_sync cannot be shown where parameters are offloaded",
        story="With offload the parameter shows a shard on the host while the unreduced gradient is whole; the tests "
        "skipped every configuration with offload and did not notice.",
        source="pytorch issue 98494, PR 100180",
        plant=planting((GradientStore, "publish", instead(_not_for_offloaded))),
        checks=("offload.no_sync",),
        silent=False,
    ),
    Exhibit(
        id="B036",
        title="the second reduction within one backward overwrites the first",
        story="A unit that runs twice in a forward reduced its gradient once for each run, and the later result took the "
        "place of the earlier one.",
        source="facebookresearch/fairscale PR 513, PR 784",
        plant=planting(
            (forward, "tracked_views", instead(_anew)),
            (GradientStore, "add_reduced", instead(_overwrites)),
            (GradientStore, "publish", instead(_ends_pass)),
        ),
        checks=("shared.module_called_twice",),
    ),
    Exhibit(
        id="B114",
        title="micro-batches before the last are not reduced over replicas",
        story="Hybrid sharding added up gradients after the reduction within a shard group and forgot the part that was "
        "there before the reduction over replicas.",
        source="pytorch PR 125484, PR 126166",
        plant=planting((grad_sync.GradSync, "_built_in", instead(_kept_stays_in_replica))),
        checks=("hybrid.schedule",),
        world_sizes=(4,),
    ),
    Exhibit(
        id="B164",
        title="what only micro-batches without reduction have used is never reduced",
        story="A parameter that the last micro-batch of an accumulation does not use kept the gradient of this rank "
        "alone, since only what took part in the last backward was reduced.",
        source="pytorch issue 69031, PR 124193",
        plant=planting((backward, "_reduce_leftovers", skipped())),
        checks=("unused.in_accumulation",),
    ),
    Exhibit(
        id="B166",
        title="what a communication hook computes is dropped",
        story="The hook's result replaced the bucket, and gradients still looked at the memory of before.",
        source="pytorch PR 43307",
        plant=planting((grad_sync.GradSync, "_by_hook", instead(_result_is_dropped))),
        checks=("comm_hook.result_is_kept",),
        fuzzed=False,
    ),
)
