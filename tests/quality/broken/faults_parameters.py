"""Faults in which parameters count: unused, frozen, shared ones, and padding."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from fault import fault
from faults_access import IgnoringAdapter, IgnoringToy
from faults_kinds import kind
from planting import planted
from torch import nn
from toy import Toy

from fsdp_testing.adapters.shared.fsdp_options import FsdpNames


@fault("unused.never")
class UnusedDecays(Toy):
    """A parameter that no iteration uses gets a gradient of zeros, on which weight decay steps."""

    def reduce(self) -> None:
        super().reduce()
        for shard in self.shards.values():
            if shard.grad is None and shard.requires_grad:
                shard.grad = shard.detach() * 1e-3


@fault("unused.parameters_differ_between_ranks")
class UnusedHereCountsNot(Toy):
    """A mean is over the ranks that used the parameter."""

    def mean(self, fqn: str, contribution: torch.Tensor) -> torch.Tensor:
        users = torch.tensor([float(fqn in self.sums)])
        self.all_reduce(users)
        return super().mean(fqn, contribution) * (self.size / users.to(contribution.dtype))


@fault("frozen.units_at_the_start")
class FrozenStemMoves(Toy):
    """Frozen parameters in front of the first trained one are trained too, with the gradient of the norm."""

    def unshard(self) -> None:
        super().unshard()
        names = list(self.full)
        trained = [f for f in names if self.shards[f].requires_grad]
        if trained and torch.is_grad_enabled() and self.inner.training:
            for fqn in names[: names.index(trained[0])]:
                self.shards[fqn].data.mul_(1.0001)


@fault("frozen.inside_a_unit")
class FrozenBesideTrained(Toy):
    """A frozen parameter gets zeros as its gradient if its module trains something else."""

    def reduce(self) -> None:
        super().reduce()
        for fqn, shard in self.shards.items():
            if not shard.requires_grad and fqn.endswith("bias"):
                shard.grad = torch.ones_like(shard)


@fault("frozen.everything")
class FrozenModelMoves(Toy):
    """A model without trainable parameters decays in each forward."""

    def unshard(self) -> None:
        super().unshard()
        if not any(shard.requires_grad for shard in self.shards.values()):
            for shard in self.shards.values():
                shard.data.mul_(0.999)


@fault("frozen.schedule")
class FrozenGathersOnce(Toy):
    """Frozen parameters lose their last bits in every local micro-batch."""

    def finish_backward(self) -> None:
        super().finish_backward()
        for shard in self.shards.values():
            if not shard.requires_grad and not self.synchronize:
                shard.data = shard.data.float().to(shard.dtype)


@fault("frozen.toggled")
class ThawedTwiceForgotten(Toy):
    """A parameter that was thawed before and frozen again is reduced no more."""

    def mean(self, fqn: str, contribution: torch.Tensor) -> torch.Tensor:
        mean = super().mean(fqn, contribution)
        flags: dict[str, int] = self.__dict__.setdefault("flags", {})
        return contribution if flags.get(fqn) else mean

    def unshard(self) -> None:
        flags: dict[str, int] = self.__dict__.setdefault("flags", {})
        for fqn, shard in self.shards.items():
            if not shard.requires_grad:
                flags[fqn] = 1
        super().unshard()


@fault("shared.module_registered_twice")
class SecondNameCountsToo(Toy):
    """A module under two names counts twice."""

    def contribution(self, fqn: str) -> torch.Tensor:
        names = [n for n, p in self.inner.named_parameters(remove_duplicate=False) if p is self.full[fqn]]
        return super().contribution(fqn) * len(names)


@fault("shared.accumulated")
class RepeatedUnitReplaces(Toy):
    """A shared parameter's local micro-batch replaces the one before."""

    def accumulate(self, fqn: str, gradient: torch.Tensor) -> None:
        names = [n for n, p in self.inner.named_parameters(remove_duplicate=False) if p is self.full[fqn]]
        if len(names) > 1 and not self.synchronize:
            self.sums.pop(fqn, None)
        super().accumulate(fqn, gradient / 2 if not self.synchronize else gradient)


@fault("sizes.clipped_and_accumulated")
class PaddingAccumulates(Toy):
    """The norm counts what the padding of uneven parameters has collected under no_sync."""

    local = 0

    def finish_backward(self) -> None:
        self.local += not self.synchronize
        super().finish_backward()

    def total_norm(self, norm_type: float) -> torch.Tensor:
        odd = sum(parameter.numel() % self.size for parameter in self.full.values())
        return super().total_norm(norm_type) * (1 + 1e-3 * odd * self.local)


@fault("construction.shares")
class HoldsEverything(Toy):
    """Every rank keeps all parameters, whatever the strategy says."""

    def span(self, numel: int) -> tuple[int, int]:
        return 0, numel

    def gather(self, fqn: str) -> torch.Tensor:
        return self.shards[fqn].detach().clone()


@planted("fsdp_ref-wrapper", FsdpNames, "wrap", "hybrid.shares")
def shards_over_all_ranks(original: Any, names: Any, module: nn.Module, setup: Any, apply: Any) -> nn.Module:
    """Hybrid strategies shard over all ranks, and there is no replica."""
    flat = {"hybrid_shard": "full_shard", "hybrid_shard_zero2": "shard_grad_op"}.get(setup.strategy)
    if flat is not None:
        setup = dataclasses.replace(setup, strategy=flat, mesh=None)
    return original(names, module, setup, apply)


@kind(IgnoringAdapter, "wrapping.ignored_trained")
class IgnoredAreAveraged(IgnoringToy):
    """Gradients of ignored modules are averaged over ranks, as those of all others are."""

    def finish_backward(self) -> None:
        super().finish_backward()
        for parameter in self.outside.values():
            if parameter.grad is not None:
                self.all_reduce(parameter.grad)
                parameter.grad.div_(self.size)
