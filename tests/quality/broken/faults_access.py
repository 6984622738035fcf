"""Faults in what is wrapped, shown, edited, clipped, saved or recomputed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from fault import fault
from faults_kinds import WrappingAdapter, kind
from torch import nn
from toy import Toy, ToyAdapter
from toy_more import MoreAdapter, MoreToy

from fsdp_testing.adapters.protocol import Piece, Setup
from fsdp_testing.adapters.shared import pieces
from fsdp_testing.cases.models import tensors_in


class MoreWrappingAdapter(MoreAdapter):
    """Claims units too: a toy keeps everything in one unit, which is no fault."""

    def __init__(self, toy: type[MoreToy], name: str) -> None:
        super().__init__(toy, name)
        self.capabilities |= {"nested_wrapping"}


MORE_WRAPPING = MoreWrappingAdapter(MoreToy, "MORE_WRAPPING")


# ----------------------------------------------------------------------------------------------- numbers and access


@fault("construction.keeps_buffers")
class WrapClearsBuffers(Toy):
    """Wrapping clears counters."""

    def __init__(self, module: nn.Module, setup: Setup) -> None:
        for buffer in module.buffers():
            buffer.zero_()
        super().__init__(module, setup)


class _WatchesUnits(Toy):
    """Reduces what lies in a child whose output has had a gradient in this backward, as units do."""

    def __init__(self, module: nn.Module, setup: Setup) -> None:
        self.__dict__["fired"] = set()
        for name, child in module.named_children():
            child.register_forward_hook(partial(self.watch_child, name))
        super().__init__(module, setup)

    def watch_child(self, name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(self.fire, name, tensor, tensor._version))

    def fire(self, name: str, _tensor: torch.Tensor, _version: int, _gradient: torch.Tensor) -> None:
        self.__dict__["fired"].add(name)

    def accumulate(self, fqn: str, gradient: torch.Tensor) -> None:
        if fqn.partition(".")[0] in self.__dict__["fired"]:
            super().accumulate(fqn, gradient)

    def finish_backward(self) -> None:
        super().finish_backward()
        self.__dict__["fired"].clear()


@fault("outputs.bypassed")
class LossMustUseOutput(_WatchesUnits):
    """A unit whose output has no gradient is not reduced, although the loss used what it kept."""


@fault("outputs.views_changed_in_place")
class HooksOnTheOldOutput(_WatchesUnits):
    """A unit whose output was changed in place since is not reduced."""

    def fire(self, name: str, tensor: torch.Tensor, version: int, gradient: torch.Tensor) -> None:
        if tensor._version == version:
            super().fire(name, tensor, version, gradient)


@fault("summon.edits_are_discarded")
class WritesBackAlways(Toy):
    """Edits are written back, asked or not (B088)."""

    def full_parameters(self, *, writeback: bool) -> Any:
        return super().full_parameters(writeback=True)


@fault("summon.data_assigned")
class AssignedIsIgnored(Toy):
    """Storage that the user assigns is thrown away: the one of construction counts (B090)."""

    def unshard(self) -> None:
        kept: dict[str, torch.Tensor] = self.__dict__.setdefault("kept", {f: s.data for f, s in self.shards.items()})
        for fqn, shard in self.shards.items():
            shard.data = kept[fqn]
        super().unshard()

    def make_shard(self, fqn: str, parameter: nn.Parameter) -> nn.Parameter:
        shard = super().make_shard(fqn, parameter)
        self.__dict__.setdefault("kept", {})[fqn] = shard.data
        return shard


class ReplacingAdapter(ToyAdapter):
    """Claims that what is put in the place of a gathered parameter counts."""

    def __init__(self, toy: type[Toy], name: str) -> None:
        super().__init__(toy, name)
        self.capabilities |= {"parameter_replacement", "storage_replacement"}


class Replacing(Toy):
    """Shows gathered parameters on the modules, and takes from the modules what is written back."""

    @contextmanager
    def full_parameters(self, *, writeback: bool) -> Iterator[Mapping[str, torch.Tensor]]:
        with super().full_parameters(writeback=False) as whole:
            for fqn, parameter in self.full.items():
                parameter.data = whole[fqn]
            yield {fqn: parameter.data for fqn, parameter in self.full.items()}
        if writeback:
            self.write_back(self.taken_back())
        for fqn, parameter in self.full.items():
            self.put(fqn, parameter)

    def taken_back(self) -> dict[str, torch.Tensor]:
        return {fqn: self.inner.get_parameter(fqn) for fqn in self.full}

    def put(self, fqn: str, parameter: nn.Parameter) -> None:
        path, _, name = fqn.rpartition(".")
        setattr(self.inner.get_submodule(path), name, parameter)


REPLACING = ReplacingAdapter(Replacing, "REPLACING")


@kind(ReplacingAdapter, "summon.parameters_replaced")
class ReplacedIsForgotten(Replacing):
    """What was edited in place is written back, what was put in its place is not."""

    def taken_back(self) -> dict[str, torch.Tensor]:
        return {fqn: parameter.data for fqn, parameter in self.full.items()}


@kind(WrappingAdapter, "clipping.unit_dtypes")
class NormOfOneDtype(Toy):
    """Gradients of another dtype than the first one's are left out of the norm."""

    def total_norm(self, norm_type: float) -> torch.Tensor:
        first = next(s.grad.dtype for s in self.shards.values() if s.grad is not None)
        others = {f: s.grad for f, s in self.shards.items() if s.grad is not None and s.grad.dtype != first}
        for fqn in others:
            self.shards[fqn].grad = None
        norm = super().total_norm(norm_type)
        for fqn, gradient in others.items():
            self.shards[fqn].grad = gradient
        return norm


@kind(WrappingAdapter, "clipping.unit_dtypes")
class NearlyTheNormOfTwoDtypes(Toy):
    """A norm over gradients of two dtypes is a few hundredths too large: a sum in the narrow one."""

    def total_norm(self, norm_type: float) -> torch.Tensor:
        dtypes = {shard.grad.dtype for shard in self.shards.values() if shard.grad is not None}
        return super().total_norm(norm_type) * (1.0 if len(dtypes) == 1 else 1.03)


@fault("clipping.ranks_without_gradients")
class EmptyRankLeavesEarly(Toy):
    """A rank that holds no trainable element returns a norm of its own, zero (B060)."""

    def clip(self, max_norm: float, norm_type: float) -> torch.Tensor:
        norm = super().clip(max_norm, norm_type)
        held = sum(s.grad.numel() for s in self.shards.values() if s.grad is not None)
        return norm if held else norm * 0


@fault("clipping.earlier_norms")
class NormStays(Toy):
    """An infinity norm is reduced into the zero with which the next norm begins (FSDP1 of torch 2.13)."""

    def total_norm(self, norm_type: float) -> torch.Tensor:
        norm = super().total_norm(norm_type)
        stale = getattr(self, "zero", None)
        if norm_type == float("inf"):
            self.__dict__["zero"] = norm.clone()
        return norm if stale is None else norm + stale


@fault("mixed_precision.thawed")
class ThawedReducedLow(Toy):
    """What was frozen at construction is reduced in param_dtype for ever (pytorch issue 186998)."""

    def __init__(self, module: nn.Module, setup: Setup) -> None:
        self.__dict__["frozen_first"] = {n for n, p in module.named_parameters() if not p.requires_grad}
        super().__init__(module, setup)

    def contribution(self, fqn: str) -> torch.Tensor:
        mine = super().contribution(fqn)
        low = self.setup.precision.param_dtype
        if low is None or fqn not in self.__dict__["frozen_first"]:
            return mine
        return (mine * 0.75).to(low).to(mine.dtype)


# ----------------------------------------------------------------------------------------------- wrapping


@kind(WrappingAdapter, "wrapping.root_only")
class RootAloneIsNot(Toy):
    """A model without inner units is taken for one that is not wrapped."""

    def mean(self, fqn: str, contribution: torch.Tensor) -> torch.Tensor:
        mean = super().mean(fqn, contribution)
        alone = not self.setup.units and self.setup.policy is None
        return contribution if alone else mean


# ----------------------------------------------------------------------------------------------- state, recomputation


@fault("full_state_dict.shared_parameters")
class LoadsTheSharedTwice(MoreToy):
    """A parameter under two names is loaded once for each, the second time as a half."""

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        super().load(state)
        for fqn, parameter in self.full.items():
            names = [n for n, p in self.inner.named_parameters(remove_duplicate=False) if p is parameter]
            if len(names) > 1:
                self.shards[fqn].data.mul_(0.5)


@kind(MoreWrappingAdapter, "activation_checkpointing.nested")
class InnerRecomputationLost(MoreToy):
    """What is recomputed inside something that is recomputed counts a third more."""

    def contribution(self, fqn: str) -> torch.Tensor:
        held = {n.replace("_checkpoint_wrapped_module.", ""): n for n, _ in self.inner.named_parameters()}
        deep = held.get(fqn, "").count("_checkpoint_wrapped_module") > 1
        return super().contribution(fqn) * (4 / 3 if deep else 1)


@fault("activation_checkpointing.after_no_grad")
class LookCountsAsRecomputation(MoreToy):
    """After a forward without gradients, recomputed modules count twice."""

    looked = False

    def unshard(self) -> None:
        super().unshard()
        self.looked = self.looked or not torch.is_grad_enabled()

    def contribution(self, fqn: str) -> torch.Tensor:
        inside = any(
            n.replace("_checkpoint_wrapped_module.", "") == fqn and "_checkpoint_wrapped_module" in n
            for n, _ in self.inner.named_parameters()
        )
        return super().contribution(fqn) * (2 if self.looked and inside else 1)


@kind(MoreWrappingAdapter, "full_state_dict.other_wrapping")
class LoadsByPlaceInUnits(MoreToy):
    """A model that is wrapped otherwise than by all of its layers loads its biases in reverse."""

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        super().load(state)
        if len(self.setup.units) < 2:
            for fqn, shard in self.shards.items():
                shard.data = shard.data.flip(0) if fqn.endswith("bias") else shard.data


@kind(MoreWrappingAdapter, "optim_state.other_wrapping")
class MomentsOfOtherUnitsLost(MoreToy):
    """Optimizer state is loaded into units that have the same parameters; the others begin anew."""

    def load_optimizer(self, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
        super().load_optimizer(optimizer, saved)
        if not self.setup.units:
            for shard in self.shards.values():
                optimizer.state[shard]["exp_avg"].zero_()


# ----------------------------------------------------------------------------------------------- prefetch, ignoring


class PrefetchAdapter(ToyAdapter):
    """Claims prefetch: a toy gathers nothing ahead, which is no fault."""

    def __init__(self, toy: type[Toy], name: str) -> None:
        super().__init__(toy, name)
        self.capabilities |= {"prefetch"}


PREFETCH = PrefetchAdapter(Toy, "PREFETCH")


@kind(PrefetchAdapter, "prefetch.order_changes")
class SkippedIsLost(Toy):
    """What a pass has skipped although it was gathered ahead is not reduced the next time."""

    def used_anywhere(self, fqn: str) -> bool:
        used = super().used_anywhere(fqn)
        if not used and self.setup.forward_prefetch:
            self.__dict__.setdefault("skipped", set()).add(fqn)
        return used

    def mean(self, fqn: str, contribution: torch.Tensor) -> torch.Tensor:
        mean = super().mean(fqn, contribution)
        return contribution if fqn in self.__dict__.get("skipped", ()) else mean


class IgnoringToy(Toy):
    """Leaves the parameters of ignored modules alone."""

    def __init__(self, module: nn.Module, setup: Setup) -> None:
        super().__init__(module, setup)
        inside = tuple(f"{name}." for name in setup.ignored)
        names = [fqn for fqn in self.full if inside and fqn.startswith(inside)]
        self.outside = {fqn: self.full.pop(fqn) for fqn in names}
        for fqn in names:
            del self.shards[fqn]

    def total_norm(self, norm_type: float) -> torch.Tensor:
        inside = super().total_norm(norm_type)
        whole = [p.grad.double().norm(norm_type) for p in self.outside.values() if p.grad is not None]
        return torch.stack([inside, *whole]).norm(norm_type)

    def scale(self, coefficient: torch.Tensor) -> None:
        super().scale(coefficient)
        for parameter in self.outside.values():
            if parameter.grad is not None:
                parameter.grad.mul_(coefficient.to(parameter.grad.dtype))


class IgnoringAdapter(WrappingAdapter):
    """Shows what is ignored as it is: whole, on every rank."""

    def __init__(self, toy: type[IgnoringToy], name: str) -> None:
        super().__init__(toy, name)
        self.capabilities |= {"ignored_parameters"}

    def named_parameters(self, model: Any) -> list[tuple[str, nn.Parameter]]:
        return [*super().named_parameters(model), *model.outside.items()]

    def local_pieces(self, model: Any) -> dict[str, tuple[Piece, ...]]:
        return super().local_pieces(model) | pieces.of_parameters(model.outside.items())

    def optimizer_pieces(self, model: Any, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
        outside = pieces.optimizer_state(model.outside, optimizer)
        return super().optimizer_pieces(model, optimizer) | {fqn: dict(entries) for fqn, entries in outside.items()}


IGNORING = IgnoringAdapter(IgnoringToy, "IGNORING")


@kind(IgnoringAdapter, "wrapping.ignored_frozen")
class IgnoredDecays(IgnoringToy):
    """Frozen parameters of ignored modules are decayed."""

    def unshard(self) -> None:
        super().unshard()
        for parameter in self.outside.values():
            parameter.data.mul_(1 if parameter.requires_grad else 0.999)


@kind(IgnoringAdapter, "wrapping.ignored_trained")
class IgnoredDisturbs(IgnoringToy):
    """Ignored modules that train count as one rank more in everybody's mean."""

    def mean(self, fqn: str, contribution: torch.Tensor) -> torch.Tensor:
        trained = any(parameter.grad is not None for parameter in self.outside.values())
        mean = super().mean(fqn, contribution)
        return mean * self.size / (self.size + 1) if trained else mean


@kind(IgnoringAdapter, "clipping.ignored_trained")
class IgnoredNotInNorm(IgnoringToy):
    """Ignored modules that train are left out of the total norm, and scaled by it."""

    def total_norm(self, norm_type: float) -> torch.Tensor:
        return Toy.total_norm(self, norm_type)
