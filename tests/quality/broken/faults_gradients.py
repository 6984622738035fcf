"""Faults in how gradients are averaged, accumulated and kept."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from fault import fault
from torch import nn
from toy import Toy

from fsdp_testing.adapters.protocol import Setup


@fault("training.gradients_are_means")
class SumForMean(Toy):
    """The sum over ranks is not divided."""

    def mean(self, fqn: str, contribution: torch.Tensor) -> torch.Tensor:
        return super().mean(fqn, contribution) * self.size


@fault("training.gradients_are_means")
class NotReduced(Toy):
    """Every rank keeps its own gradient."""

    def mean(self, fqn: str, contribution: torch.Tensor) -> torch.Tensor:
        super().mean(fqn, contribution)
        return contribution


@fault("training.gradients_are_means")
class DividedTwice(Toy):
    """The mean is divided by the world size once more (B113)."""

    def mean(self, fqn: str, contribution: torch.Tensor) -> torch.Tensor:
        return super().mean(fqn, contribution) / self.size


@fault("training.gradients_are_means")
class OneRankIgnored(Toy):
    """The last rank's gradient does not count."""

    def contribution(self, fqn: str) -> torch.Tensor:
        mine = super().contribution(fqn)
        return mine * 0 if self.rank == self.size - 1 else mine


@fault("training.gradients_are_means")
class NeighboursSpan(Toy):
    """A rank keeps the next rank's span of the mean."""

    def store(self, fqn: str, mean: torch.Tensor) -> None:
        super().store(fqn, mean.roll(1) if self.setup.strategy == "full_shard" else mean)


@fault("training.empty_batches")
class WeightedByRows(Toy):
    """A rank without rows does not count in the mean."""

    def mean(self, fqn: str, contribution: torch.Tensor) -> torch.Tensor:
        busy = torch.tensor([float(bool(contribution.any()))])
        self.all_reduce(busy)
        return super().mean(fqn, contribution) * self.size / max(float(busy), 1.0)


@fault("accumulation.no_sync_then_reduced")
class LastLocalLost(Toy):
    """Of the local micro-batches the last one is not reduced."""

    def accumulate(self, fqn: str, gradient: torch.Tensor) -> None:
        if self.synchronize or fqn not in self.sums:
            super().accumulate(fqn, gradient)


@fault("accumulation.no_sync_then_reduced")
class OnlyLastMicroBatch(Toy):
    """A micro-batch replaces the sum of those before it."""

    def accumulate(self, fqn: str, gradient: torch.Tensor) -> None:
        self.sums[fqn] = gradient.clone()


@fault("accumulation.no_sync_then_reduced")
class RescaledEachTime(Toy):
    """The sum is halved at every micro-batch: weights 1/2, 1/4, ... (B124)."""

    def accumulate(self, fqn: str, gradient: torch.Tensor) -> None:
        super().accumulate(fqn, gradient)
        if not self.synchronize:
            self.sums[fqn] = self.sums[fqn] / 2


@fault("accumulation.without_no_sync")
class ReplacesEarlier(Toy):
    """A reduced gradient replaces the earlier one instead of being added (B029)."""

    def store(self, fqn: str, mean: torch.Tensor) -> None:
        self.shards[fqn].grad = None
        super().store(fqn, mean)


@fault("accumulation.alternating")
class ForgetsReducedPart(Toy):
    """A local micro-batch drops what was reduced before it."""

    def finish_backward(self) -> None:
        if not self.synchronize:
            self.zero_grad()
        super().finish_backward()


@fault("accumulation.ends_on_local")
class ReducesInNoSync(Toy):
    """The last local micro-batch is dropped when a forward pass follows it."""

    def forward(self, *args: object, **kwargs: object) -> object:
        if not torch.is_grad_enabled() or not self.inner.training:
            self.sums = {}
        return super().forward(*args, **kwargs)


@fault("accumulation.magnitudes")
class LostBits(Toy):
    """Local micro-batches add up in half precision."""

    def accumulate(self, fqn: str, gradient: torch.Tensor) -> None:
        super().accumulate(fqn, gradient)
        if not self.synchronize:
            self.sums[fqn] = self.sums[fqn].half().to(gradient.dtype)


@fault("accumulation.alternating")
class NoSyncStays(Toy):
    """Leaving no_sync restores reduction one micro-batch too late."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.synchronize = False
        self.late = 1
        yield

    def finish_backward(self) -> None:
        super().finish_backward()
        self.late = getattr(self, "late", 0) - 1
        self.synchronize = self.late < 0


@fault("training.each_operation_exactly")
class OneUlp(Toy):
    """One element of one rank's gradient is off by one unit in the last place."""

    def store(self, fqn: str, mean: torch.Tensor) -> None:
        super().store(fqn, mean)
        gradient = self.shards[fqn].grad
        if self.rank == self.size - 1 and gradient is not None and gradient.numel():
            gradient[:1] = torch.nextafter(gradient[:1], torch.tensor(math.inf, dtype=gradient.dtype))


@fault("training.sgd_momentum")
class OneRankDrifts(Toy):
    """One rank's gradient is off by 1e-6 of itself."""

    def store(self, fqn: str, mean: torch.Tensor) -> None:
        super().store(fqn, mean * (1 + 1e-6) if self.rank == 0 else mean)


@fault("training.magnitudes")
class ClampsLarge(Toy):
    """Gradients above three are cut off."""

    def mean(self, fqn: str, contribution: torch.Tensor) -> torch.Tensor:
        return super().mean(fqn, contribution).clamp(-3, 3)


@fault("shared.within_a_unit")
class TiedGradientDropped(Toy):
    """Of a tied parameter only half of the gradient arrives."""

    def contribution(self, fqn: str) -> torch.Tensor:
        sites = sum(p is self.full[fqn] for _, p in self.inner.named_parameters(remove_duplicate=False))
        return super().contribution(fqn) / sites


@fault("shared.module_called_twice")
class FirstCallOnly(Toy):
    """A module called twice in a forward is given half of its gradient (B036)."""

    def __init__(self, module: nn.Module, setup: Setup) -> None:
        super().__init__(module, setup)
        self.calls = calls = Counter[str]()
        for name, inner in module.named_modules():
            inner.register_forward_hook(lambda *_, name=name: calls.update([name]))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.clear()
        return super().forward(*args, **kwargs)

    def contribution(self, fqn: str) -> torch.Tensor:
        return super().contribution(fqn) / (2 if self.calls[fqn.rpartition(".")[0]] > 1 else 1)


@fault("frozen.unit_in_the_middle")
class FrozenGetsGradient(Toy):
    """A frozen parameter is given a gradient of zeros, and AdamW decays it."""

    def reduce(self) -> None:
        super().reduce()
        for shard in self.shards.values():
            if not shard.requires_grad:
                shard.grad = torch.zeros_like(shard)


@fault("frozen.thawed_later")
class StaysFrozen(Toy):
    """A parameter that was frozen when it was wrapped never trains."""

    def make_shard(self, fqn: str, parameter: nn.Parameter) -> nn.Parameter:
        self.frozen = {*getattr(self, "frozen", set()), *(() if parameter.requires_grad else (fqn,))}
        return super().make_shard(fqn, parameter)

    def store(self, fqn: str, mean: torch.Tensor) -> None:
        if fqn not in self.frozen:
            super().store(fqn, mean)


@fault("frozen.frozen_later")
class FreezingIgnored(Toy):
    """Freezing after wrapping has no effect on gradients."""

    def unshard(self) -> None:
        super().unshard()
        for parameter in self.full.values():
            parameter.requires_grad_(True)


@fault("unused.gradient_is_none")
class UnusedGetsZeros(Toy):
    """A parameter that no rank used is given zeros."""

    def used_anywhere(self, fqn: str) -> bool:
        super().used_anywhere(fqn)
        return self.shards[fqn].requires_grad


@fault("unused.sometimes")
class StaleGradientOfUnused(Toy):
    """A parameter that is not used is given the gradient of the last time it was."""

    def contribution(self, fqn: str) -> torch.Tensor:
        self.last = getattr(self, "last", {})
        self.last[fqn] = super().contribution(fqn)
        return self.last[fqn]

    def reduce(self) -> None:
        super().reduce()
        for fqn, old in getattr(self, "last", {}).items():
            if self.shards[fqn].grad is None:
                self.store(fqn, old)


@fault("unused.units_differ_between_ranks")
class CountsUsersOnly(Toy):
    """The sum is divided by the number of ranks that used the parameter."""

    def mean(self, fqn: str, contribution: torch.Tensor) -> torch.Tensor:
        users = torch.tensor([float(fqn in self.sums)])
        self.all_reduce(users)
        return super().mean(fqn, contribution) * self.size / max(float(users), 1.0)


@fault("unused.in_accumulation")
class LastBatchDecides(Toy):
    """What the last micro-batch did not use is not reduced (B164)."""

    def finish_backward(self) -> None:
        used = {fqn for fqn, parameter in self.full.items() if parameter.grad is not None}
        if self.synchronize:
            self.sums = {fqn: gradient for fqn, gradient in self.sums.items() if fqn in used}
        super().finish_backward()


@fault("zero_grad.both_forms")
class ZeroGradByShape(Toy):
    """Zeros left by zero_grad are taken for no gradient at all: the step after it does nothing."""

    def store(self, fqn: str, mean: torch.Tensor) -> None:
        shard = self.shards[fqn]
        if shard.grad is not None and not bool(shard.grad.any()):
            return
        super().store(fqn, mean)


@fault("training.sgd_momentum")
class ExtraCollectiveOnOneRank(Toy):
    """One rank reduces once more than the others."""

    def reduce(self) -> None:
        super().reduce()
        if self.rank == 0:
            dist.all_reduce(torch.zeros(1), async_op=True)


# ----------------------------------------------------------------------------------------------- awaiting reduction


@fault("accumulation.cleared")
class ClearingForgetsLocal(Toy):
    """Clearing knows the shards' gradients, and not what awaits reduction."""

    def clear_sums(self, set_to_none: bool) -> None:
        pass


@fault("accumulation.cleared")
class ClearingToNoneOnly(Toy):
    """What awaits reduction is cleared by None, and not by zeros."""

    def clear_sums(self, set_to_none: bool) -> None:
        if set_to_none:
            super().clear_sums(set_to_none)


@fault("accumulation.cleared_after_reduction")
class ClearsOnlyUnreduced(Toy):
    """What was reduced before a local micro-batch is added again when the gradient is cleared in between."""

    def finish_backward(self) -> None:
        if not self.synchronize:
            self.__dict__["kept"] = {fqn: s.grad.clone() for fqn, s in self.shards.items() if s.grad is not None}
        super().finish_backward()
        for fqn, held in (self.__dict__.pop("kept", {}) if self.synchronize else {}).items():
            if self.setup.strategy == "full_shard":
                self.shards[fqn].grad = held


@fault("accumulation.cleared_then_unused")
class ClearedComesBackUnused(Toy):
    """What was reduced before a local micro-batch and then cleared is there again where the next one does not use it."""

    def finish_backward(self) -> None:
        if not self.synchronize:
            self.__dict__["kept"] = {fqn: s.grad.clone() for fqn, s in self.shards.items() if s.grad is not None}
        used = {fqn for fqn, parameter in self.full.items() if parameter.grad is not None}
        cleared = {fqn for fqn in self.full if fqn not in self.sums or not self.sums[fqn].any()}
        super().finish_backward()
        for fqn, held in (self.__dict__.pop("kept", {}) if self.synchronize else {}).items():
            if fqn in cleared - used:
                self.shards[fqn].grad = held


@fault("accumulation.edited")
class EditsReachGradients(Toy):
    """What is written back scales gradients that await reduction as well."""

    def write_back(self, whole: Any) -> None:
        super().write_back(whole)
        self.sums = {fqn: held * 0.5 for fqn, held in self.sums.items()}


@fault("accumulation.assigned")
class NewStorageDropsGradients(Toy):
    """A forward that finds other storage drops what awaits reduction."""

    def unshard(self) -> None:
        places = [shard.data_ptr() for shard in self.shards.values()]
        if self.sums and self.__dict__.get("places", places) != places:
            self.sums = {}
        self.__dict__["places"] = places
        super().unshard()


@fault("accumulation.frozen")
class FrozenIsNotReduced(Toy):
    """A frozen parameter is left out of the reduction, and what awaited it is lost."""

    def used_anywhere(self, fqn: str) -> bool:
        return super().used_anywhere(fqn) and self.shards[fqn].requires_grad


@fault("accumulation.late_optimizer")
class FirstStepOnLocal(Toy):
    """Before the first clearing of gradients the latest micro-batch alone is reduced."""

    def reduce(self) -> None:
        super().reduce()
        self.__dict__["reduced"] = True

    def accumulate(self, fqn: str, gradient: torch.Tensor) -> None:
        if "reduced" not in self.__dict__:
            self.sums.pop(fqn, None)
        super().accumulate(fqn, gradient)


# ----------------------------------------------------------------------------------------------- roundings


@fault("mixed_precision.local_sums")
class AddsUpInComputeDtype(Toy):
    """Local micro-batches add up in the dtype in which they were computed."""

    def accumulate(self, fqn: str, gradient: torch.Tensor) -> None:
        held = self.sums.get(fqn)
        self.sums[fqn] = gradient.clone() if held is None else held + gradient


@fault("mixed_precision.smallest_numbers")
class DividesBeforeTheSum(Toy):
    """Every contribution is divided by the number of ranks before the sum, against what the adapter says."""

    def mean(self, fqn: str, contribution: torch.Tensor) -> torch.Tensor:
        total = contribution / self.size
        self.all_reduce(total)
        return total


# ----------------------------------------------------------------------------------------------- not finite


@fault("clipping.infinite")
class InfiniteIsOne(Toy):
    """A norm that overflows counts as one, so that the finite gradients are kept."""

    def total_norm(self, norm_type: float) -> torch.Tensor:
        norm = super().total_norm(norm_type)
        return torch.where(norm.isinf(), torch.ones_like(norm), norm)


@fault("clipping.infinite")
class OwnNormIsInfinite(Toy):
    """Only the rank that holds the infinite gradient says so."""

    def total_norm(self, norm_type: float) -> torch.Tensor:
        norm = super().total_norm(norm_type)
        mine = [shard.grad for shard in self.shards.values() if shard.grad is not None]
        return norm if not all(bool(grad.isfinite().all()) for grad in mine) else torch.nan_to_num(norm, posinf=7.0)


@fault("clipping.not_a_number")
class NanCountsNothing(Toy):
    """What is no number counts as zero in the norm."""

    def total_norm(self, norm_type: float) -> torch.Tensor:
        return torch.nan_to_num(super().total_norm(norm_type), nan=0.0, posinf=math.inf)
