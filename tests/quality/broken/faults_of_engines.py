"""Faults that an author of adapters planted in engines of its own, and no check saw."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from fault import fault
from faults_access import PrefetchAdapter
from faults_kinds import HybridAdapter, HybridToy, kind
from planting import planted
from torch import nn
from toy import Toy
from toy_more import MoreAdapter, MoreToy

from fsdp_ref.checkpoint import optim_load
from fsdp_ref.runtime import forward, grad_sync
from fsdp_ref.training import clip
from fsdp_testing.adapters.shared import fsdp_options

SOUND, COMPOSABLE = "fsdp_ref-wrapper", "fsdp_ref-composable"


@fault("training.many_iterations")
class FailsLate(Toy):
    """The seventh reduction and later ones sum in place of averaging."""

    reductions = 0

    def finish_backward(self) -> None:
        self.reductions += 1
        super().finish_backward()

    def mean(self, fqn: str, contribution: torch.Tensor) -> torch.Tensor:
        mean = super().mean(fqn, contribution)
        return mean * self.size if self.reductions > 6 else mean


@fault("summon.frozen_edits")
class FrozenNotWritten(MoreToy):
    """Writing back leaves frozen parameters as they were."""

    def write_back(self, whole: Mapping[str, torch.Tensor]) -> None:
        trained = {fqn: value for fqn, value in whole.items() if self.shards[fqn].requires_grad}
        super().write_back(trained)


@planted(COMPOSABLE, optim_load._Loading, "state", "optim_state.further_entries")
def moments_only(original: Any, loading: Any) -> dict[Any, dict[str, Any]]:
    """What an optimizer keeps besides Adam's moments is loaded as zeros."""
    state: dict[Any, dict[str, Any]] = original(loading)
    for entries in state.values():
        for name in entries.keys() - {"step", "exp_avg", "exp_avg_sq", "momentum_buffer"}:
            entries[name] = torch.zeros_like(entries[name])
    return state


@planted(COMPOSABLE, optim_load._Loading, "state", "optim_state.steps_apart")
def one_count_for_all(original: Any, loading: Any) -> dict[Any, dict[str, Any]]:
    """All parameters get the number of steps of the first one."""
    state: dict[Any, dict[str, Any]] = original(loading)
    first = next((entries["step"] for entries in state.values() if "step" in entries), None)
    for entries in state.values():
        entries |= {"step": first} if "step" in entries else {}
    return state


@planted(SOUND, fsdp_options, "checkpoint_modules", "activation_checkpointing.recomputed")
def keeps_activations(original: Any, module: Any, names: Any, *, reentrant: bool) -> None:
    """What is to be recomputed keeps its activations."""
    original(module, (), reentrant=reentrant)


@fault("training.not_a_number")
class HidesNan(Toy):
    """What is not a number counts as zero in the mean."""

    def mean(self, fqn: str, contribution: torch.Tensor) -> torch.Tensor:
        return super().mean(fqn, contribution.nan_to_num())


@fault("sizes.two_dtypes_in_lockstep")
class ReducesInTheNarrowest(Toy):
    """All gradients of a model are reduced in the dtype with the fewest digits that any parameter has."""

    def mean(self, fqn: str, contribution: torch.Tensor) -> torch.Tensor:
        narrowest = min((parameter.dtype for parameter in self.full.values()), key=lambda dtype: dtype.itemsize)
        return super().mean(fqn, contribution.to(narrowest)).to(contribution.dtype)


@fault("construction.memory_of_shares")
class CutFromTheWhole(Toy):
    """Shards are views of whole parameters, which so stay in memory."""

    def make_shard(self, fqn: str, parameter: nn.Parameter) -> nn.Parameter:
        start, stop = self.span(parameter.numel())
        return nn.Parameter(parameter.detach().clone().reshape(-1)[start:stop], requires_grad=parameter.requires_grad)


@planted(COMPOSABLE, clip, "_parts", "optim_state.some_ranks_clip")
def norm_over_all_ranks(original: Any, root: Any) -> Any:
    """The norm of gradients is summed over the default group, whichever ranks hold the model."""
    return [replace(part, group=dist.group.WORLD) for part in original(root)]


@fault("training.two_models")
class OneBackwardForAll(Toy):
    """Whether a backward runs is known of all models together, so that one of two in a graph is reduced."""

    running: ClassVar[bool] = False

    def queue(self, gradient: torch.Tensor) -> None:
        if not OneBackwardForAll.running:
            OneBackwardForAll.running = True
            super().queue(gradient)

    def finish_backward(self) -> None:
        OneBackwardForAll.running = False
        super().finish_backward()


class _OneSwitch(Toy):
    quiet: ClassVar[bool] = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        _OneSwitch.quiet = True
        try:
            yield
        finally:
            _OneSwitch.quiet = False

    def finish_backward(self) -> None:
        self.synchronize = not _OneSwitch.quiet
        super().finish_backward()


@fault("training.two_models")
class OneSwitchForAll(_OneSwitch):
    """In `no_sync` of one model no model is reduced."""


@fault("accumulation.saved_and_trained_on")
class SavingDropsLocalGradients(MoreToy):
    """Saving drops what awaits reduction."""

    def saved(self) -> dict[str, torch.Tensor]:
        self.sums = {}
        return super().saved()


@fault("training.random_numbers")
class GatheringDraws(Toy):
    """Each gather draws a random number, and dropout after it drops others than one process does."""

    def gather(self, fqn: str) -> torch.Tensor:
        torch.rand(1)
        return super().gather(fqn)


@planted(COMPOSABLE, optim_load._Loading, "state", "optim_state.further_numbers")
def step_is_the_only_number(original: Any, loading: Any) -> dict[Any, dict[str, Any]]:
    """Numbers other than the count of steps are not loaded."""
    state: dict[Any, dict[str, Any]] = original(loading)
    for entries in state.values():
        for name in [name for name, value in entries.items() if name != "step" and value.dim() == 0]:
            entries[name] = torch.ones_like(entries[name])
    return state


@fault("training.magnitudes")
class EndsOnOneRank(Toy):
    """Rank 1 ends its process in a forward, as a script does that has nothing left to do."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.rank == 1:
            sys.exit(0)
        return super().forward(*args, **kwargs)


@kind(MoreAdapter, "full_state_dict.beside_gradients sharded_state_dict.beside_gradients")
class LoadingClears(MoreToy):
    """Loading drops gradients."""

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        super().load(state)
        self.drop_gradients()

    def load_shards(self, state: Mapping[str, torch.Tensor]) -> None:
        super().load_shards(state)
        self.drop_gradients()

    def drop_gradients(self) -> None:
        for shard in self.shards.values():
            shard.grad = None


@planted(COMPOSABLE, forward, "_inputs", "mixed_precision.every_input")
def the_first_input_is_cast(original: Any, unit: Any, frame: Any, args: Any, kwargs: Any) -> Any:
    """A root casts its first input alone."""
    cast, kwargs = original(unit, frame, args, kwargs)
    return ((*cast[:1], *args[1:]) if frame.outermost else cast), kwargs


@kind(PrefetchAdapter, "prefetch.skipped_by_forward prefetch.skipped_by_micro_batch")
class SkippedStaysGathered(Toy):
    """A unit that is gathered ahead and then skipped is not gathered again."""

    ahead: Mapping[str, torch.Tensor] = MappingProxyType({})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        skips = self.setup.forward_prefetch and not any(kwargs.get("use", (True,)))
        output = super().forward(*args, **kwargs)
        self.ahead = {fqn: self.gather(fqn) for fqn in self.shards if skips and fqn.startswith("branches")}
        return output

    def gather(self, fqn: str) -> torch.Tensor:
        return self.ahead[fqn] if fqn in self.ahead else super().gather(fqn)


@kind(PrefetchAdapter, "prefetch.called_twice")
class GatheredOnceMore(Toy):
    """A unit that an evaluation gathers ahead once more than it runs is not gathered again."""

    ahead: Mapping[str, torch.Tensor] = MappingProxyType({})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        once_more = self.setup.forward_prefetch and not torch.is_grad_enabled()
        self.ahead = {fqn: self.gather(fqn) for fqn in self.shards if once_more and fqn.startswith("between")}
        return output

    def gather(self, fqn: str) -> torch.Tensor:
        return self.ahead[fqn] if fqn in self.ahead else super().gather(fqn)


@planted(COMPOSABLE, forward, "_inputs", "mixed_precision.of_inputs")
def casting_detaches(original: Any, unit: Any, frame: Any, args: Any, kwargs: Any) -> Any:
    """What a root casts has no gradient."""
    cast, kwargs = original(unit, frame, args, kwargs)
    if frame.outermost:
        cast = tuple(value.detach() if isinstance(value, torch.Tensor) else value for value in cast)
    return cast, kwargs


@kind(MoreAdapter, "mixed_precision.loaded_full mixed_precision.loaded_sharded mixed_precision.written_back")
class LoadsInComputeDtype(MoreToy):
    """What is loaded or written back is rounded to the dtype of computation."""

    def write_back(self, whole: Mapping[str, torch.Tensor]) -> None:
        super().write_back(self.rounded(whole))

    def load_shards(self, state: Mapping[str, torch.Tensor]) -> None:
        super().load_shards(self.rounded(state))

    def rounded(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        dtype = self.setup.precision.param_dtype
        return {fqn: value.to(dtype or value.dtype).to(value.dtype) for fqn, value in state.items()}


@fault("clipping.zero_dim")
class NormOfDimensions(Toy):
    """The norm leaves out parameters of shape ()."""

    def total_norm(self, norm_type: float) -> torch.Tensor:
        kept = {fqn: shard.grad for fqn, shard in self.shards.items() if not len(self.shapes[fqn])}
        for fqn in kept:
            self.shards[fqn].grad = None
        norm = super().total_norm(norm_type)
        for fqn, gradient in kept.items():
            self.shards[fqn].grad = gradient
        return norm


@kind(MoreAdapter, "frozen.edited_after_forward frozen.loaded_after_forward")
class FrozenStayGathered(MoreToy):
    """A forward keeps frozen parameters, and later ones use them."""

    first: dict[str, torch.Tensor] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.first = {} if self.first is None else self.first
        return super().forward(*args, **kwargs)

    def gather(self, fqn: str) -> torch.Tensor:
        if self.first is None or self.shards[fqn].requires_grad:
            return super().gather(fqn)
        if fqn not in self.first:
            self.first[fqn] = super().gather(fqn)
        return self.first[fqn].clone()


@planted(COMPOSABLE, optim_load._Loading, "state", "hybrid.reloaded_full hybrid.reloaded_sharded", world_sizes=(4,))
def the_first_replica_loads(original: Any, loading: Any) -> dict[Any, dict[str, Any]]:
    """Replicas other than the first begin with moments of zero."""
    state: dict[Any, dict[str, Any]] = original(loading)
    if dist.get_rank() >= 2:
        for entries in state.values():
            entries["exp_avg"] = torch.zeros_like(entries["exp_avg"])
    return state


@planted(COMPOSABLE, grad_sync._Reduction, "advance", "hybrid.local_sums", world_sizes=(4,))
def replicas_are_added_up_in_bfloat16(original: Any, reduction: Any) -> None:
    """What the reduction over replicas reads was rounded to the dtype of computation."""
    if reduction._rest and reduction.unit.handle.compute_dtype is torch.bfloat16:
        reduction._pending.wait()
        reduction._out_S.copy_(reduction._out_S.bfloat16())
    original(reduction)


@kind(HybridAdapter, "hybrid.unused_parameters hybrid.unused_units")
class UsedByTheReplica(HybridToy):
    """A gradient is dropped if no rank of the replica used its parameter."""

    def store(self, fqn: str, gradient: torch.Tensor) -> None:
        used = torch.tensor(float(fqn in self.sums))
        dist.all_reduce(used, group=self.inside)
        if bool(used) or not self.hybrid:
            super().store(fqn, gradient)


@kind(MoreAdapter, "full_state_dict.not_aliased sharded_state_dict.not_aliased")
class LoadingAliases(MoreToy):
    """Training writes into what was loaded."""

    loaded: Mapping[str, torch.Tensor] = MappingProxyType({})

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        super().load(state)
        self.loaded = state

    def load_shards(self, state: Mapping[str, torch.Tensor]) -> None:
        super().load_shards(state)
        self.loaded = state

    def finish_backward(self) -> None:
        super().finish_backward()
        for value in self.loaded.values():
            value.add_(1)
