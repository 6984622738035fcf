"""Faults that somebody planted without knowing the checks, and that no check and hardly a random case noticed then."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from fault import FAULTS, Fault, fault
from planting import planted
from torch import nn
from toy import Toy
from toy_more import MoreToy

from fsdp_ref.runtime import grad_sync
from fsdp_ref.training import clip
from fsdp_testing.adapters import registry
from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.cases.models import tensors_in
from fsdp_testing.oracle import models

SOUND = "fsdp_ref-wrapper"

# ------------------------------------------------------------------------------------------------- the number of ranks


@fault("training.gradients_are_means")
class SumAtOddSizes(Toy):
    """Worlds of an odd size get the sum divided by the even number below."""

    def mean(self, fqn: str, contribution: torch.Tensor) -> torch.Tensor:
        return super().mean(fqn, contribution) * (self.size / (self.size - self.size % 2 if self.size > 1 else 1))


AT_ODD_SIZES = f"{__name__}:SumAtOddSizes"
FAULTS[AT_ODD_SIZES] = dataclasses.replace(FAULTS[AT_ODD_SIZES], world_sizes=(3,))

# ---------------------------------------------------------------------------------------------------------- schedules


@fault("accumulation.nested_no_sync")
class NestedNoSyncStays(Toy):
    """Leaving the outer no_sync puts back what held when the inner one was entered."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.before, self.synchronize = self.synchronize, False
        try:
            yield
        finally:
            self.synchronize = self.before


@fault("trace.nested_no_sync")
class NestedNoSyncReduces(MoreToy):
    """Leaving a no_sync begins to reduce, inside another one, too."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.synchronize = False
        try:
            yield
        finally:
            self.synchronize = True


@fault("accumulation.gradient_edited")
class KeepsSumOfItsOwn(Toy):
    """What was reduced so far is kept beside the gradients, and they are set to it when the next part is added."""

    def store(self, fqn: str, mean: torch.Tensor) -> None:
        held = self.__dict__.setdefault("reduced", {})
        if self.shards[fqn].grad is None:
            held.pop(fqn, None)
        elif fqn in held and bool(self.shards[fqn].grad.any()):
            self.shards[fqn].grad = held[fqn].clone()
        super().store(fqn, mean)
        held[fqn] = self.shards[fqn].grad.detach().clone()


@fault("zero_grad.some_parameters")
class OneNoneClearsAll(Toy):
    """A gradient that is None counts as zero_grad: the next reduction begins anew for all."""

    def reduce(self) -> None:
        gradients = [shard.grad is None for shard in self.shards.values()]
        if any(gradients):
            self.zero_grad()
        super().reduce()


@fault("accumulation.edited_in_place")
class StaleWhilePending(Toy):
    """While gradients await reduction, forward computes with what was gathered before."""

    def unshard(self) -> None:
        if not self.sums:
            super().unshard()


@fault("backward.of_inputs")
class DividesLossGradient(Toy):
    """The gradient of the outputs is divided by the number of ranks, so that the sum over ranks is the mean."""

    def watch(self, output: Any) -> None:
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: gradient / self.size)
        super().watch(output)

    def mean(self, fqn: str, contribution: torch.Tensor) -> torch.Tensor:
        return super().mean(fqn, contribution) * self.size


@fault("conversion.deepcopy_in_no_sync")
class CopyStaysLocal(MoreToy):
    """A copy that is made inside no_sync never reduces."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module = models.replica_of(self.inner, {id(p): nn.Parameter(p.detach().clone()) for p in self.full.values()})
        with torch.no_grad():
            for fqn, parameter in module.named_parameters():
                parameter.copy_(self.gather(fqn).reshape(self.shapes[fqn]))
        twin = type(self)(module, self.setup)
        twin.synchronize = self.synchronize
        return twin


@contextmanager
def _for_good(model: nn.Module) -> Iterator[None]:
    with DDP.no_sync(model):
        yield
    model.require_backward_grad_sync = False


DDP = registry.adapter_of("torch-ddp")
DDP_STAYS_LOCAL = dataclasses.replace(
    DDP, name="stays local", reference=f"{__name__}:DDP_STAYS_LOCAL", no_sync=_for_good
)
"""DDP whose no_sync does not end. No fault of a check: DDP without it does not pass the check, either."""


# -------------------------------------------------------------------------------------------------------------- sizes

PAGES = 64 << 10
BUCKET = 16 << 20


@fault("sizes.wide")
class LosesTheTail(Toy):
    """Of shards of more than 64 KiB the last part is gathered as zeros."""

    def gather(self, fqn: str) -> torch.Tensor:
        whole = super().gather(fqn)
        shard = self.shards[fqn]
        if shard.numel() * shard.element_size() > PAGES:
            whole[-1:] = 0
        return whole


@fault("sizes.huge")
class OneBucketReduced(Toy):
    """What is beyond the first 16 MiB of a gradient is not reduced."""

    def mean(self, fqn: str, contribution: torch.Tensor) -> torch.Tensor:
        mean = super().mean(fqn, contribution)
        first = BUCKET // contribution.element_size()
        mean[first:] = contribution[first:]
        return mean


# ------------------------------------------------------------------------------------------------------------- hybrid


@planted(SOUND, clip, "_means", "hybrid.combined", world_sizes=(4,))
def sum_over_shard_groups(original: Any, params: Any, unit: Any) -> Any:
    """With replicas, gradients of ignored parameters count as the mean of one shard group divided by the replicas."""
    groups = unit.config.groups
    replicas = groups.replicate.size() if groups.replicate is not None else 1
    return (mean / replicas for mean in original(params, unit))


@planted(SOUND, grad_sync._Reduction, "then_all_reduce", "hybrid.combined", world_sizes=(4,))
def replicas_keep_their_means(original: Any, self: Any, collectives: Any, groups: Any) -> None:
    """Reduced in a dtype of its own, a gradient is the mean over the shard group: replicas are not asked."""
    low = self._out_S.dtype is torch.bfloat16
    if low:
        self._after /= math.prod(group.size() for group in groups)
    original(self, collectives, [] if low else groups)


@planted(SOUND, clip, "_parts", "hybrid.norms", world_sizes=(2,))
def replicas_of_one_counted(original: Any, root: Any) -> Any:
    """Where shard groups have one rank, what replicas hold counts once for each of them."""
    hybrid = root.unit.config.groups.replicate is not None
    parts = original(root)
    return [dataclasses.replace(p, group=dist.group.WORLD) if p.group is None and hybrid else p for p in parts]


# -------------------------------------------------------------------------------------------------------------- state


@planted(SOUND, nn.Module, "load_state_dict", "full_state_dict.strict")
def loads_what_fits(original: Any, self: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
    """What a state lacks stays as it is, and what it has too much is passed over."""
    return original(self, state, strict=False)


def _with_methods(checks: str, base: str = SOUND, **methods: Callable[[Adapter], Any]) -> Callable[[type], Adapter]:
    """Register the reference with other methods as a fault; the docstring of the decorated class is its story."""

    def register(what: type) -> Adapter:
        target, sound = f"{what.__module__}:{what.__name__}", registry.adapter_of(base)
        made = {name: make(sound) for name, make in methods.items()}
        adapter = dataclasses.replace(sound, name=what.__name__, reference=target, **made)
        FAULTS[target] = Fault(adapter, (checks,), (what.__doc__ or "").strip(), base, fuzzed=False)
        return adapter

    return register


def _row_major(value: Any) -> Any:
    """A moment of a convolution, whose weight lies channels last, in that order but with the strides of a contiguous one."""
    turned = isinstance(value, torch.Tensor) and value.dim() == 4
    return value.permute(0, 2, 3, 1).reshape(value.shape) if turned else value


@_with_methods(
    "optim_state.strided_parameters",
    load_full_optimizer_state=lambda sound: (
        lambda model, optimizer, saved: sound.load_full_optimizer_state(
            model,
            optimizer,
            {
                **saved,
                "state": {
                    fqn: {name: _row_major(value) for name, value in entries.items()}
                    for fqn, entries in saved["state"].items()
                },
            },
        )
    ),
)
class LoadsMomentsInStorageOrder:
    """Loaded moments of weights that are not contiguous belong to other elements (physicsnemo PR 1597)."""


BY_HAND = "fsdp_ref-composable"


@_with_methods("unshard.gathers", BY_HAND, unshard=lambda _: lambda _model, _unit: None)
class GathersNothingByHand:
    """Gathering by hand does nothing."""


@_with_methods("unshard.gathers", BY_HAND, reshard=lambda _: lambda _model, _unit: None)
class ReleasesNothingByHand:
    """Releasing by hand does nothing."""


@_with_methods("unshard.gathers", BY_HAND, unshard_async=lambda _: lambda _model, _unit: None)
class BeginsNothingByHand:
    """A gather by hand that is only begun is not."""


@_with_methods(
    "full_state_dict.strict",
    load_full_state_dict=lambda sound: (
        lambda model, state: sound.load_full_state_dict(
            model, {fqn: state[fqn] for fqn in sound.full_state_dict(model)}
        )
    ),
)
class PassesOverUnknown:
    """What a state has too much is passed over."""


@_with_methods(
    "full_state_dict.strict",
    load_full_state_dict=lambda sound: (
        lambda model, state: sound.load_full_state_dict(
            model,
            {fqn: state[fqn][: len(own)] for fqn, own in sound.full_state_dict(model).items()}
            | {fqn: state[fqn] for fqn in state.keys() - sound.full_state_dict(model).keys()},
        )
    ),
)
class CutsToShape:
    """What is too long is cut."""


@_with_methods(
    "sharded_state_dict.strict",
    load_sharded_state_dict=lambda sound: (
        lambda model, state: sound.load_sharded_state_dict(model, {**sound.sharded_state_dict(model), **state})
    ),
)
class KeepsWhatShardsLack:
    """A parameter that a state in shards lacks keeps its values."""


def _of_parameters(own: Any, saved: Any) -> Any:
    known = own["state"].keys()
    groups = [{**group, "params": [n for n in group["params"] if n in known]} for group in saved["param_groups"]]
    return {**saved, "state": {n: each for n, each in saved["state"].items() if n in known}, "param_groups": groups}


@_with_methods(
    "optim_state.strict",
    load_full_optimizer_state=lambda sound: (
        lambda model, optimizer, saved: sound.load_full_optimizer_state(
            model, optimizer, _of_parameters(sound.full_optimizer_state(model, optimizer), saved)
        )
    ),
)
class PassesOverUnknownMoments:
    """Moments of a parameter that the model does not have are passed over."""


def _of_shapes(own: Any, state: Any) -> dict[str, Any]:
    return {name: state[name] if state[name].shape == value.shape else value for name, value in own.items()}


@_with_methods(
    "local_state_dict.strict",
    load_local_state_dict=lambda sound: (
        lambda model, state: sound.load_local_state_dict(model, {**sound.local_state_dict(model), **state})
    ),
)
class KeepsWhatRawStateLacks:
    """A flat parameter that a raw state lacks keeps its values."""


@_with_methods(
    "sharded_state_dict.other_shapes",
    load_sharded_state_dict=lambda sound: (
        lambda model, state: sound.load_sharded_state_dict(model, _of_shapes(sound.sharded_state_dict(model), state))
    ),
)
class KeepsWhatIsMisshapen:
    """A parameter whose shards have another shape keeps its values."""


def _refuse(_model: nn.Module, _state: Any) -> None:
    raise ValueError("expected another state")


@_with_methods("full_state_dict.strict", load_full_state_dict=lambda _sound: _refuse)
class RefusesEverything:
    """No state can be loaded."""


def _halved(value: Any) -> Any:
    return models.cast_floats(value, torch.bfloat16)


@_with_methods(
    "full_state_dict.dtypes", full_state_dict=lambda sound: lambda model: _halved(sound.full_state_dict(model))
)
class SavesInLowPrecision:
    """What is saved is in bfloat16."""


@_with_methods(
    "optim_state.dtypes",
    full_optimizer_state=lambda sound: lambda model, optimizer: _halved(sound.full_optimizer_state(model, optimizer)),
)
class SavesMomentsInLowPrecision:
    """Saved optimizer state is in bfloat16."""


def _by_position(sound: Adapter) -> Callable[..., None]:
    def load(model: nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
        names = {id(parameter): fqn for fqn, parameter in sound.named_parameters(model)}
        order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
        state = dict(saved["state"])
        for shape in {entry["exp_avg"].shape for entry in state.values()}:
            alike = [fqn for fqn, entry in saved["state"].items() if entry["exp_avg"].shape == shape]
            wanted = [fqn for fqn in order if fqn in alike]
            state |= {fqn: saved["state"][other] for fqn, other in zip(wanted, alike)}
        sound.load_full_optimizer_state(model, optimizer, {**saved, "state": state})

    return load


@_with_methods("optim_state.reordered", load_full_optimizer_state=_by_position)
class LoadsByPosition:
    """Saved optimizer state goes to the parameters in the order in which it was saved, where shapes fit."""
