"""Bugs of gradient reduction and accumulation."""

from __future__ import annotations

from typing import Any

from planting import known_bug

from fsdp_ref.comm.division import DivideFactors
from fsdp_ref.handle.gradients import Gradients
from fsdp_ref.runtime import grad_sync


@known_bug("B024", grad_sync._Reduction, "then_all_reduce", "pytorch PR 89915", "hybrid.trained", world_sizes=(4,))
def no_second_level(original: Any, self: Any, collectives: Any, groups: Any) -> None:
    """Hybrid sharding without the reduction over replicas.

    The second level of the gradient's reduction is left out: each replica group trains alone, with the gradient of
    its own ranks.
    """
    original(self, collectives, [])


@known_bug(
    "B025", grad_sync.GradSync, "_built_in", "pytorch issue 154888", "hybrid.degenerate_groups", world_sizes=(2,)
)
def alone(original: Any, self: Any, unit: Any, handle: Any, grads: Any) -> None:
    """A shard group of one rank is never reduced over its replicas.

    HYBRID_SHARD on an (n, 1) mesh is taken for NO_SHARD over one rank: every rank keeps its own gradient, divided by
    n, and the replicas drift apart.
    """
    if handle.groups.shard_size > 1 or handle.groups.replicate is None:
        original(self, unit, handle, grads)
        return
    local_F, _ = grad_sync.gather_local(handle, grads, handle.precision.reduce, float(handle.groups.total_size))
    handle.grads.add_reduced(local_F.clone())


@known_bug("B029", Gradients, "add_reduced", "pytorch issue 73784, PR 73535", "offload.without_no_sync")
def offloaded_replaces(original: Any, self: Any, grad_S: Any, uses: Any = None) -> None:
    """With CPU offload a second reduced gradient replaces the first.

    Accumulation without no_sync and with offloaded parameters keeps the newest gradient only; the documentation
    called it unsupported, the code was silent.
    """
    if self._handle.config.offload:
        self.absorb()
        self.sum.reduced_S = None
    original(self, grad_S, uses)


@known_bug("B113", DivideFactors, "for_world", "pytorch issue 155903, PR 155915", "hybrid.trained", world_sizes=(4,))
def divided_again(original: Any, cls: Any, world_size: int) -> DivideFactors:
    """Gradients over more than one group are divided once too often.

    The factor of the reduction counted the ranks of one group where the sum ran over two, so that the same model
    trained with another effective learning rate on another mesh.
    """
    factors = original(cls, world_size)
    return DivideFactors(factors.before, factors.after * (2 if world_size > 2 else 1))


@known_bug(
    "B124",
    Gradients,
    "add_local",
    "NVIDIA/Megatron-LM PR 3023",
    "accumulation.magnitudes accumulation.no_sync_then_reduced",
)
def rescaled(original: Any, self: Any, grads: Any) -> None:
    """Each further micro-batch rescales those before it.

    Accumulated gradients were scaled along with the new one, so that micro-batches weigh 1/2, 1/4, 1/8.
    """
    if self.sum.local_F is not None:
        self.sum.local_F.div_(2)
    original(self, grads)


@known_bug("B167", Gradients, "take_local", "InfiniTrain issue 183", "accumulation.no_sync_then_reduced")
def forgets_local(original: Any, self: Any, *grads: Any) -> Any:
    """The first micro-batch of an accumulation is lost.

    Buckets were rebuilt after the first step while gradients were still in the old ones; what the first micro-batch
    had left there was not carried over.
    """
    original(self)
    return original(self, *grads)
