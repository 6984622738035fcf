"""Faults in what wrapping brings, in units gathered by hand, and under the strategy that keeps parameters whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from faults_kinds import WrappingAdapter, kind
from torch import nn
from toy import Toy

from fsdp_testing.adapters.protocol import Piece, Setup


class StartingToy(Toy):
    """Has modules initialised, broadcasts, can be gathered by hand, runs hooks on its shards, and raises when it clips."""

    source = 0

    def __init__(self, module: nn.Module, setup: Setup) -> None:
        if setup.init_module is not None:
            self.initialise(list(module.modules()), setup.init_module)
        if setup.sync_module_states:
            for tensor in self.to_broadcast(module):
                dist.broadcast(tensor.detach(), self.source)
        super().__init__(module, setup)

    def initialise(self, modules: list[nn.Module], init_module: Any) -> None:
        for inner in modules:
            init_module(inner)

    def to_broadcast(self, module: nn.Module) -> Iterator[torch.Tensor]:
        yield from module.parameters()
        yield from module.buffers()

    def accumulate(self, fqn: str, gradient: torch.Tensor) -> None:
        super().accumulate(fqn, self.run_tensor_hooks(self.shards[fqn], gradient))

    def run_tensor_hooks(self, shard: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
        for hook in (shard._backward_hooks or {}).values():
            gradient = hook(gradient)
        return gradient

    def store(self, fqn: str, mean: torch.Tensor) -> None:
        super().store(fqn, mean)
        self.run_accumulation_hooks(self.shards[fqn])

    def run_accumulation_hooks(self, shard: nn.Parameter) -> None:
        for hook in (shard._post_accumulate_grad_hooks or {}).values():
            hook(shard)

    def check_finite(self, norm: torch.Tensor) -> None:
        if not norm.isfinite():
            raise RuntimeError(f"the total norm is {norm}")

    def gather_unit(self, unit: str) -> None:
        """All is one unit, which is gathered in place of any."""
        self.unshard()

    def begin_to_gather(self, unit: str) -> None:
        self.gather_unit(unit)

    def release_unit(self, unit: str) -> None:
        for parameter in self.full.values():
            parameter.data = torch.full_like(parameter, float("nan"))


class StartingAdapter(WrappingAdapter):
    """The adapter of a `StartingToy` class."""

    def __init__(self, toy: type[StartingToy], name: str) -> None:
        super().__init__(toy, name)
        self.capabilities |= {
            "sync_module_states", "meta_init", "explicit_unshard", "shard_grad_op", "tensor_hooks", "accumulation_hooks",
            "error_if_nonfinite",
        }  # fmt: skip

    def clip_grad_norm(
        self, model: StartingToy, max_norm: float, norm_type: float, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        norm = model.total_norm(norm_type)
        if error_if_nonfinite:
            model.check_finite(norm)
        model.scale(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def unshard(self, model: StartingToy, unit: str) -> None:
        model.gather_unit(unit)

    def unshard_async(self, model: StartingToy, unit: str) -> None:
        model.begin_to_gather(unit)

    def reshard(self, model: StartingToy, unit: str) -> None:
        model.release_unit(unit)


STARTING = StartingAdapter(StartingToy, "STARTING")


# ----------------------------------------------------------------------------------------------- rank 0's values


@kind(StartingAdapter, "construction.rank_0_parameters")
class FrozenNotBroadcast(StartingToy):
    """Each rank keeps its own values of frozen parameters."""

    def to_broadcast(self, module: nn.Module) -> Iterator[torch.Tensor]:
        return (tensor for tensor in super().to_broadcast(module) if tensor.requires_grad or tensor.dim() == 0)


@kind(StartingAdapter, "construction.rank_0_parameters")
class OtherRankBroadcasts(StartingToy):
    """The values of rank 1 are broadcast in place of those of rank 0."""

    source = 1


@kind(StartingAdapter, "construction.rank_0_buffers")
class BuffersNotBroadcast(StartingToy):
    """Parameters are broadcast, and buffers are not."""

    def to_broadcast(self, module: nn.Module) -> Iterator[torch.Tensor]:
        yield from module.parameters()


@kind(StartingAdapter, "construction.rank_0_buffers")
class UnsavedNotBroadcast(StartingToy):
    """Only what a state dict holds is broadcast."""

    def to_broadcast(self, module: nn.Module) -> Iterator[torch.Tensor]:
        yield from module.state_dict().values()


@kind(StartingAdapter, "construction.meta_then_rank_0")
class BroadcastBeforeInitialising(StartingToy):
    """What is on the meta device is left out of the broadcast, and initialised by each rank afterwards."""

    def to_broadcast(self, module: nn.Module) -> Iterator[torch.Tensor]:
        return iter(()) if "initialised" in self.__dict__ else super().to_broadcast(module)

    def initialise(self, modules: list[nn.Module], init_module: Any) -> None:
        self.__dict__["initialised"] = True
        super().initialise(modules, init_module)


# ----------------------------------------------------------------------------------------------- from the meta device


@kind(StartingAdapter, "construction.meta_parameters")
class ZerosFromMeta(StartingToy):
    """Modules that hold no module get memory that nobody initialises."""

    def initialise(self, modules: list[nn.Module], init_module: Any) -> None:
        for inner in modules:
            if next(inner.children(), None) is None:
                inner.to_empty(device="cpu")
                for tensor in (*inner.parameters(), *inner.buffers()):
                    tensor.detach().zero_()
            else:
                init_module(inner)


@kind(StartingAdapter, "construction.meta_parameters")
class ThawedFromMeta(StartingToy):
    """What was frozen on the meta device trains once it is initialised."""

    def initialise(self, modules: list[nn.Module], init_module: Any) -> None:
        super().initialise(modules, init_module)
        for parameter in modules[0].parameters():
            parameter.requires_grad_(True)


@kind(StartingAdapter, "construction.meta_buffers")
class BuffersLeftOnMeta(StartingToy):
    """Buffers are given memory after the module was initialised, and what was in them is lost."""

    def initialise(self, modules: list[nn.Module], init_module: Any) -> None:
        super().initialise(modules, init_module)
        for buffer in modules[0].buffers():
            buffer.zero_()


# ----------------------------------------------------------------------------------------------- gathered by hand


@kind(StartingAdapter, "unshard.before_forward")
class HandGatheredIsReducedTwice(StartingToy):
    """A forward that finds its units gathered takes them for those of a backward that is still to be reduced."""

    def gather_unit(self, unit: str) -> None:
        super().gather_unit(unit)
        self.__dict__["by_hand"] = True

    def contribution(self, fqn: str) -> torch.Tensor:
        return super().contribution(fqn) * (2 if self.__dict__.get("by_hand") else 1)


class _KeepsGathered(StartingToy):
    """A forward gathers nothing if somebody has gathered by hand."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.__dict__["in_forward"] = True
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.__dict__["in_forward"] = False

    def unshard(self) -> None:
        if not (self.__dict__.get("gathered") and self.__dict__.get("in_forward")):
            super().unshard()

    def gather_unit(self, unit: str) -> None:
        super().gather_unit(unit)
        self.__dict__["gathered"] = True


@kind(StartingAdapter, "unshard.before_forward")
class BegunCountsAsGathered(_KeepsGathered):
    """A gather that was begun and not waited for counts as one that has arrived."""

    def begin_to_gather(self, unit: str) -> None:
        self.__dict__["gathered"] = True


@kind(StartingAdapter, "unshard.and_reshard")
class ForgetsThatItReleased(_KeepsGathered):
    """What was gathered and released by hand counts as gathered."""

    def release_unit(self, unit: str) -> None:
        for parameter in self.full.values():
            parameter.data = torch.zeros_like(parameter)


@kind(StartingAdapter, "unshard.sees_the_step")
class StaysGatheredOverSteps(_KeepsGathered):
    """What was gathered by hand is used for good."""


# ----------------------------------------------------------------------------------------------- strategy, optimizer


@kind(StartingAdapter, "accumulation.fresh_weights")
class WholeOverTheStep(StartingToy):
    """Under the strategy that keeps parameters from forward to backward they are kept over the step as well."""

    def unshard(self) -> None:
        if self.setup.strategy != "shard_grad_op" or "kept" not in self.__dict__:
            super().unshard()
        self.__dict__["kept"] = True


@kind(StartingAdapter, "training.optimizer_state")
class StateOfTheNeighbour(StartingToy):
    """The moments of a shard lie one element off."""

    def pieces(self, fqn: str, value: torch.Tensor, gradient: torch.Tensor | None) -> tuple[Piece, ...]:
        state = value is not self.shards[fqn] and self.setup.strategy == "full_shard"
        return super().pieces(fqn, value.roll(1) if state else value, gradient)


# ----------------------------------------------------------------------------------------------- hooks, errors


@kind(StartingAdapter, "parameter_hooks.own_gradient")
class TensorHooksTooEarly(StartingToy):
    """Hooks on parameters run before the gradient is there, and are given zeros."""

    def run_tensor_hooks(self, shard: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
        super().run_tensor_hooks(shard, torch.zeros_like(gradient))
        return gradient


@kind(StartingAdapter, "parameter_hooks.own_gradient")
class TensorHooksAfterReduction(StartingToy):
    """Hooks on parameters are given the mean of all ranks."""

    def accumulate(self, fqn: str, gradient: torch.Tensor) -> None:
        Toy.accumulate(self, fqn, gradient)

    def mean(self, fqn: str, contribution: torch.Tensor) -> torch.Tensor:
        whole = super().mean(fqn, contribution).view(self.shapes[fqn])
        return self.run_tensor_hooks(self.shards[fqn], whole).reshape(-1)


@kind(StartingAdapter, "parameter_hooks.after_accumulation")
class AccumulationHooksTooEarly(StartingToy):
    """Hooks that run after accumulation run before the reduced gradient is in its place."""

    def store(self, fqn: str, mean: torch.Tensor) -> None:
        self.run_accumulation_hooks(self.shards[fqn])
        Toy.store(self, fqn, mean)


@kind(StartingAdapter, "parameter_hooks.after_accumulation")
class AccumulationHooksRunOnce(StartingToy):
    """Hooks run in the first backward, and never again."""

    def run_accumulation_hooks(self, shard: nn.Parameter) -> None:
        ran: set[int] = self.__dict__.setdefault("ran", set())
        if id(shard) not in ran:
            super().run_accumulation_hooks(shard)
        ran.add(id(shard))


@kind(StartingAdapter, "clipping.error_if_nonfinite")
class RaisesWhereItIs(StartingToy):
    """Only the rank that holds what is not finite raises."""

    def check_finite(self, norm: torch.Tensor) -> None:
        if not all(bool(shard.grad.isfinite().all()) for shard in self.shards.values() if shard.grad is not None):
            super().check_finite(norm)
