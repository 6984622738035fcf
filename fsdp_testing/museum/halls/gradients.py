"""Bugs of gradient reduction and accumulation."""

from __future__ import annotations

from typing import Any

from fsdp_ref.comm.division import DivideFactors
from fsdp_ref.handle.gradients import GradientStore
from fsdp_ref.runtime import grad_sync
from fsdp_testing.museum.exhibit import Exhibit
from fsdp_testing.museum.planting import instead, planting


def _no_second_level(original: Any, self: Any, collectives: Any, groups: Any) -> None:
    original(self, collectives, [])


def _alone(original: Any, self: Any, unit: Any, handle: Any, grads: Any) -> None:
    if handle.groups.shard_size > 1 or handle.groups.replicate is None:
        original(self, unit, handle, grads)
        return
    local_F = grad_sync.gather_local(handle, grads, handle.precision.reduce, float(handle.groups.total_size))
    handle.grads.add_reduced(local_F.clone())


def _offloaded_replaces(original: Any, self: Any, grad_S: Any) -> None:
    if self._handle.config.offload:
        self.absorb()
        self.reduced_S = None
    original(self, grad_S)


def _rescaled(original: Any, self: Any, grads: Any) -> None:
    if self.local_F is not None:
        self.local_F.div_(2)
    original(self, grads)


def _forgets_local(original: Any, self: Any, *grads: Any) -> None:
    original(self)


def _divided_again(original: Any, cls: Any, world_size: int) -> DivideFactors:
    factors = original(cls, world_size)
    return DivideFactors(factors.before, factors.after * (2 if world_size > 2 else 1))


EXHIBITS = (
    Exhibit(
        id="B024",
        title="hybrid sharding without the reduction over replicas",
        story="The second level of the gradient's reduction is left out: each replica group trains alone, with the "
        "gradient of its own ranks.",
        source="pytorch PR 89915",
        plant=planting((grad_sync._Reduction, "then_all_reduce", instead(_no_second_level))),
        checks=("hybrid.trained",),
        world_sizes=(4,),
    ),
    Exhibit(
        id="B025",
        title="a shard group of one rank is never reduced over its replicas",
        story="HYBRID_SHARD on an (n, 1) mesh is taken for NO_SHARD over one rank: every rank keeps its own gradient, "
        "divided by n, and the replicas drift apart.",
        source="pytorch issue 154888",
        plant=planting((grad_sync.GradSync, "_built_in", instead(_alone))),
        checks=("hybrid.degenerate_groups",),
    ),
    Exhibit(
        id="B029",
        title="with CPU offload a second reduced gradient replaces the first",
        story="Accumulation without no_sync and with offloaded parameters keeps the newest gradient only; the "
        "documentation called it unsupported, the code was silent.",
        source="pytorch issue 73784, PR 73535",
        plant=planting((GradientStore, "add_reduced", instead(_offloaded_replaces))),
        checks=("offload.without_no_sync",),
    ),
    Exhibit(
        id="B113",
        title="gradients over more than one group are divided once too often",
        story="The factor of the reduction counted the ranks of one group where the sum ran over two, so that the "
        "same model trained with another effective learning rate on another mesh.",
        source="pytorch issue 155903, PR 155915",
        plant=planting((DivideFactors, "for_world", instead(_divided_again))),
        checks=("hybrid.trained",),
        world_sizes=(4,),
    ),
    Exhibit(
        id="B124",
        title="each further micro-batch rescales those before it",
        story="Accumulated gradients were scaled along with the new one, so that micro-batches weigh 1/2, 1/4, 1/8.",
        source="NVIDIA/Megatron-LM PR 3023",
        plant=planting((GradientStore, "add_local", instead(_rescaled))),
        checks=("accumulation.magnitudes", "accumulation.no_sync_then_reduced"),
    ),
    Exhibit(
        id="B167",
        title="the first micro-batch of an accumulation is lost",
        story="Buckets were rebuilt after the first step while gradients were still in the old ones; what the first "
        "micro-batch had left there was not carried over.",
        source="InfiniTrain issue 183",
        plant=planting((GradientStore, "take_local", instead(_forgets_local))),
        checks=("accumulation.no_sync_then_reduced",),
    ),
)
