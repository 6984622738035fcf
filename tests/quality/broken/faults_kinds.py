"""Faults that only wrapping, offload, hybrid groups, and the two real models show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from fault import FAULTS, Fault, fault
from toy import Toy, ToyAdapter
from toy_more import MoreToy

from fsdp_testing.adapters.protocol import Setup

Kind = Callable[[type[Toy]], ToyAdapter]


class WrappingAdapter(ToyAdapter):
    """Claims units and policies: a toy keeps everything in one unit, which is no fault."""

    def __init__(self, toy: type[Toy], name: str) -> None:
        super().__init__(toy, name)
        self.capabilities |= {"nested_wrapping", "policy_wrapping", "policy_beside_units"}


class HybridAdapter(ToyAdapter):
    """Claims hybrid sharding."""

    def __init__(self, toy: type[Toy], name: str) -> None:
        super().__init__(toy, name)
        self.capabilities |= {"hybrid"}


def kind(adapter: type[ToyAdapter], caught_by: str) -> Kind:
    """Register a broken toy of another kind; `caught_by` has names of checks, with spaces between."""

    def register(toy: type[Toy]) -> ToyAdapter:
        made = adapter(toy, toy.__name__)
        FAULTS[f"{toy.__module__}:{toy.__name__}"] = Fault(made, tuple(caught_by.split()), (toy.__doc__ or "").strip())
        return made

    return register


# ----------------------------------------------------------------------------------------------- wrapping

WRAPPING = WrappingAdapter(Toy, "WRAPPING")


@kind(WrappingAdapter, "wrapping.nested")
class InnerUnitCountsTwice(Toy):
    """What lies in a unit inside a unit is reduced once by each."""

    def contribution(self, fqn: str) -> torch.Tensor:
        around = sum(fqn.startswith(f"{unit}.") for unit in self.setup.units)
        return super().contribution(fqn) * max(around, 1)


@kind(WrappingAdapter, "wrapping.class_policy")
class PolicyFreezes(Toy):
    """Modules that a policy over classes chose keep the rank's own gradient of their bias."""

    def mean(self, fqn: str, contribution: torch.Tensor) -> torch.Tensor:
        mean = super().mean(fqn, contribution)
        chosen = self.setup.policy is not None and bool(self.setup.policy.classes)
        return contribution if chosen and fqn.endswith("bias") else mean


@kind(WrappingAdapter, "wrapping.policy_beside_units")
class PolicyTakesUnits(Toy):
    """What was a unit before the policy ran is reduced by nobody."""

    def mean(self, fqn: str, contribution: torch.Tensor) -> torch.Tensor:
        mean = super().mean(fqn, contribution)
        units = self.setup.units if self.setup.policy is not None else ()
        return contribution if fqn.startswith(tuple(f"{unit}." for unit in units)) else mean


@kind(WrappingAdapter, "wrapping.size_policy")
class SmallOnesForgotten(Toy):
    """What a policy over sizes finds too small is not reduced."""

    def mean(self, fqn: str, contribution: torch.Tensor) -> torch.Tensor:
        mean = super().mean(fqn, contribution)
        least = self.setup.policy.min_numel if self.setup.policy is not None else None
        return contribution if least is not None and contribution.numel() < least / 10 else mean


# ----------------------------------------------------------------------------------------------- zero_grad, outputs


@fault("zero_grad.discards")
class ZeroGradForgotten(Toy):
    """The sum of all gradients is kept beside the parameter, and zero_grad does not know it."""

    def store(self, fqn: str, mean: torch.Tensor) -> None:
        kept: dict[str, torch.Tensor] = self.__dict__.setdefault("kept", {})
        kept[fqn] = kept[fqn] + mean if fqn in kept else mean
        self.shards[fqn].grad = None
        super().store(fqn, kept[fqn])


@fault("zero_grad.mixed_forms")
class HalfAfterZeros(Toy):
    """A gradient added to zeros is taken for the second half of an accumulation."""

    def store(self, fqn: str, mean: torch.Tensor) -> None:
        gradient = self.shards[fqn].grad
        again = gradient is not None and not bool(gradient.any())
        super().store(fqn, mean / 2 if again else mean)


@fault("outputs.containers")
class OnlyFirstOutput(Toy):
    """Of a tuple or list only the first tensor stays part of the graph."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if type(output) not in (tuple, list):
            return output
        rest = [item.detach() if isinstance(item, torch.Tensor) else item for item in output[1:]]
        return type(output)((output[0], *rest))


# ----------------------------------------------------------------------------------------------- offload


@fault("offload.trained")
class OffloadRounds(MoreToy):
    """Parameters that live on the CPU are stored in float32 precision."""

    def make_shard(self, fqn: str, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        shard = super().make_shard(fqn, parameter)
        if self.setup.cpu_offload:
            shard.data = shard.data.float().to(shard.dtype)
        return shard


@fault("offload.no_sync")
class OffloadForgetsLocal(MoreToy):
    """With offload, local micro-batches are dropped."""

    def accumulate(self, fqn: str, gradient: torch.Tensor) -> None:
        if self.synchronize or not self.setup.cpu_offload:
            super().accumulate(fqn, gradient)


@fault("offload.without_no_sync")
class OffloadedIsReplaced(MoreToy):
    """With offload, a reduced gradient replaces the one before it (B029)."""

    def reduce(self) -> None:
        if self.setup.cpu_offload:
            self.zero_grad()
        super().reduce()


@fault("offload.clipped")
class OffloadedNotClipped(MoreToy):
    """Gradients that live on the CPU are measured and not scaled."""

    def scale(self, coefficient: torch.Tensor) -> None:
        if not self.setup.cpu_offload:
            super().scale(coefficient)


# ----------------------------------------------------------------------------------------------- hybrid


class HybridToy(Toy):
    """Spans and gathers over the shard group; means over all ranks."""

    def __init__(self, module: torch.nn.Module, setup: Setup) -> None:
        self.hybrid = setup.strategy.startswith("hybrid")
        self.inside = setup.mesh.get_group("shard") if self.hybrid and setup.mesh is not None else None
        super().__init__(module, setup)

    def span(self, numel: int) -> tuple[int, int]:
        if not self.hybrid:
            return super().span(numel)
        place, parts = dist.get_rank(self.inside), dist.get_world_size(self.inside)
        chunk = -(-numel // parts)
        return min(place * chunk, numel), min((place + 1) * chunk, numel)

    def gather(self, fqn: str) -> torch.Tensor:
        if not self.hybrid:
            return super().gather(fqn)
        shard, numel = self.shards[fqn].detach(), self.full[fqn].numel()
        start, stop = self.span(numel)
        whole = torch.zeros(numel, dtype=shard.dtype)
        whole[start:stop] = shard
        dist.all_reduce(whole, group=self.inside)
        return whole

    def total_norm(self, norm_type: float) -> torch.Tensor:
        if not self.hybrid:
            return super().total_norm(norm_type)
        total = self.own_power(norm_type)
        dist.all_reduce(total, group=self.inside)
        return total ** (1 / norm_type)

    def own_power(self, norm_type: float) -> torch.Tensor:
        grads = [s.grad.double() for s in self.shards.values() if s.grad is not None and s.grad.numel()]
        return sum(((grad.abs() ** norm_type).sum() for grad in grads), torch.tensor(0.0, dtype=torch.float64))


HYBRID = HybridAdapter(HybridToy, "HYBRID")


@kind(HybridAdapter, "hybrid.trained")
class ReplicasDrift(HybridToy):
    """Gradients are averaged inside the shard group alone."""

    def mean(self, fqn: str, contribution: torch.Tensor) -> torch.Tensor:
        if not self.hybrid:
            return super().mean(fqn, contribution)
        total = contribution.clone()
        dist.all_reduce(total, group=self.inside)
        return total / dist.get_world_size(self.inside)


@kind(HybridAdapter, "hybrid.schedule")
class ReplicasInNorm(HybridToy):
    """The norm counts every replica (B054)."""

    def total_norm(self, norm_type: float) -> torch.Tensor:
        total = self.own_power(norm_type)
        self.all_reduce(total)
        return total ** (1 / norm_type)


@kind(HybridAdapter, "hybrid.degenerate_groups")
class GroupOfOneIsLeftAlone(HybridToy):
    """A shard group of one rank is taken for no sharding at all, and nothing is reduced."""

    def mean(self, fqn: str, contribution: torch.Tensor) -> torch.Tensor:
        mean = super().mean(fqn, contribution)
        alone = self.hybrid and dist.get_world_size(self.inside) == 1
        return contribution / self.size if alone else mean


@kind(HybridAdapter, "hybrid.one_replica_evaluates")
class EveryForwardMeetsAll(HybridToy):
    """Each forward sends rank 0's parameters to all replicas."""

    def unshard(self) -> None:
        super().unshard()
        for parameter in self.full.values():
            self.all_reduce(parameter.data.clone())


# ----------------------------------------------------------------------------------------------- real models


@fault("gpt.schedule")
class EmbeddingSkipsLocal(Toy):
    """The tied embedding is not accumulated inside no_sync."""

    def accumulate(self, fqn: str, gradient: torch.Tensor) -> None:
        if self.synchronize or fqn != "wte.weight":
            super().accumulate(fqn, gradient)


@fault("gpt.bfloat16")
class NormsDrift(Toy):
    """Gradients of norms are a ten-thousandth too large."""

    def contribution(self, fqn: str) -> torch.Tensor:
        mine = super().contribution(fqn)
        return mine * 1.0001 if "norm" in fqn else mine


@fault("moe.trained")
class RouterAlone(Toy):
    """Each rank's router keeps its own gradient."""

    def mean(self, fqn: str, contribution: torch.Tensor) -> torch.Tensor:
        mean = super().mean(fqn, contribution)
        return contribution if "router" in fqn or "gate" in fqn else mean


@fault("moe.schedule")
class IdleExpertsStale(Toy):
    """An expert's local gradient is dropped if the expert gets no token in the micro-batch that reduces."""

    def finish_backward(self) -> None:
        if self.synchronize:
            used = {fqn for fqn, parameter in self.full.items() if parameter.grad is not None}
            self.sums = {fqn: sum_ * (1 if fqn in used else 0) for fqn, sum_ in self.sums.items()}
            self.sums = {fqn: sum_ / 2 if "experts" in fqn else sum_ for fqn, sum_ in self.sums.items()}
        super().finish_backward()
