"""Bugs of what several backward passes, or several parts of one, add up to."""

from __future__ import annotations

from typing import Any

import torch
from planting import instead, known_bug, replaced

from fsdp_ref.handle import gradients
from fsdp_ref.handle.gradients import Gradients
from fsdp_ref.runtime import backward, forward, grad_sync


def _on_copies(hook: Any) -> Any:
    return lambda state, *tensors: hook(state, *(tensor.clone() for tensor in tensors))


def _anew(original: Any, unit: Any, root: Any) -> Any:
    unit.graph.forget()
    return original(unit, root)


def _ends_pass(original: Any, self: Any) -> None:
    """Instead of `Gradients.publish`, beside `_overwrites`: the next backward begins."""
    vars(self)["_added_in_pass"] = False
    original(self)


@known_bug("B002", gradients, "set_grad", "pytorch PR 90546", "accumulation.no_sync_then_reduced", silent=False)
def as_plain_torch(_original: Any, param: Any, value: Any) -> None:
    """A gradient of no_sync is put on a sharded parameter.

    Under no_sync the gradient has the shape of the whole parameter, while the parameter shows its shard: installing
    it like any other gradient is refused by torch.
    """
    param.grad = value


@known_bug("B031", Gradients, "publish", "pytorch issue 98494, PR 100180", "offload.no_sync", silent=False)
def not_for_offloaded(original: Any, self: Any) -> None:
    """A gradient of no_sync cannot be shown where parameters are offloaded.

    With offload the parameter shows a shard on the host while the unreduced gradient is whole; the tests skipped
    every configuration with offload and did not notice.
    """
    if self.local_F is not None and self._handle.config.offload:
        raise RuntimeError("attempting to assign a gradient of size '[_]' to a tensor of another size")
    original(self)


@known_bug(
    "B036",
    Gradients,
    "add_reduced",
    "facebookresearch/fairscale PR 513, PR 784",
    "shared.module_called_twice",
    also=[(forward, "tracked_views", instead(_anew)), (Gradients, "publish", instead(_ends_pass))],
)
def overwrites(original: Any, self: Any, grad_S: Any, uses: Any = None) -> None:
    """The second reduction within one backward overwrites the first.

    A unit that runs twice in a forward reduced its gradient once for each run, and the later result took the place of
    the earlier one.
    """
    kept = vars(self)
    if kept.get("_added_in_pass"):
        self.absorb()
        self.sum.reduced_S = kept["_before_pass"]
    else:
        kept["_added_in_pass"] = True
        kept["_before_pass"] = None if self.reduced_S is None else self.reduced_S.clone()
    original(self, grad_S, uses)


@known_bug("B114", grad_sync.GradSync, "_built_in", "pytorch PR 125484, PR 126166", "hybrid.schedule", world_sizes=(4,))
def kept_stays_in_replica(original: Any, self: Any, unit: Any, handle: Any, grads: Any) -> None:
    """Micro-batches before the last are not reduced over replicas.

    Hybrid sharding added up gradients after the reduction within a shard group and forgot the part that was there
    before the reduction over replicas.
    """
    kept_F = handle.grads.take_local()[0] if handle.groups.replicate is not None and handle.sharded else None
    original(self, unit, handle, grads)
    if kept_F is None:
        return
    dtype = handle.precision.reduce
    out_S = torch.empty(handle.shard_map.shard_numel, dtype=dtype)
    sent_F = kept_F.to(dtype).div_(handle.groups.total_size)
    handle.collectives.reduce_scatter(out_S, sent_F, handle.groups.shard, "kept gradient").wait()
    handle.grads.add_reduced(out_S)


@known_bug("B164", backward, "_reduce_leftovers", "pytorch issue 69031, PR 124193", "unused.in_accumulation")
def leftovers_stay(_original: Any, *_args: Any) -> None:
    """What only micro-batches without reduction have used is never reduced.

    A parameter that the last micro-batch of an accumulation does not use kept the gradient of this rank alone, since
    only what took part in the last backward was reduced.
    """


@known_bug("B166", grad_sync.GradSync, "_by_hook", "pytorch PR 43307", "comm_hook.result_is_kept", fuzzed=False)
def result_is_dropped(original: Any, self: Any, unit: Any, handle: Any, grads: Any) -> None:
    """What a communication hook computes is dropped.

    The hook's result replaced the bucket, and gradients still looked at the memory of before.
    """
    with replaced(unit, "comm_hook", _on_copies):
        original(self, unit, handle, grads)
