"""Faults that change what belongs to the user: kept gradients, hooks, inputs, groups, modes, extra state."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from fault import fault
from faults_kinds import kind
from planting import instead, planted, planting, with_fault
from torch import nn
from torch.utils.checkpoint import checkpoint
from toy import Toy
from toy_more import MoreAdapter, MoreToy

from fsdp_ref.checkpoint import model_state, optim_load
from fsdp_ref.handle.flat_handle import FlatHandle
from fsdp_ref.runtime import backward, root
from fsdp_testing.adapters.shared import fsdp_options
from fsdp_testing.cases.models import tensors_in

COMPOSABLE = "fsdp_ref-composable"


@planted(COMPOSABLE, backward, "run_after_accumulation", "parameter_hooks.steps_in_backward")
def gradients_are_put_back(original: Any, handle: FlatHandle) -> None:
    """What a hook does to `.grad` after accumulation is undone."""
    grads = [parameter.grad for parameter in handle.originals.held]
    original(handle)
    for parameter, grad in zip(handle.originals.held, grads):
        parameter.grad = grad


@planted(COMPOSABLE, backward, "end_backward", "parameter_hooks.in_no_sync")
def hooks_run_without_gradients(original: Any, of: root.Root) -> None:
    """Hooks that run after accumulation run in `no_sync` too, where there is no gradient."""
    original(of)
    for parameter in (held for unit in of.units if not unit.sync_gradients for held in unit.handle.originals.held):
        local, parameter.grad = parameter.grad, None
        for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(parameter)
        parameter.grad = local


@kind(MoreAdapter, "optim_state.entries_of_groups")
class SettingsOfItsOwn(MoreToy):
    """Groups are loaded without what the optimizer's class does not know."""

    def load_groups(self, optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
        known = [{key: value for key, value in group.items() if key in optimizer.defaults} for group in groups]
        super().load_groups(optimizer, known)


@kind(MoreAdapter, "optim_state.rates_in_tensors")
class GroupsAliased(MoreToy):
    """The tensors of groups are those of the state that was loaded."""

    def load_groups(self, optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
        for group, kept in zip(optimizer.param_groups, groups):
            group.update(kept)


@kind(MoreAdapter, "optim_state.of_one_process")
class OneStepForAll(MoreToy):
    """The saved state has one tensor as the step of all parameters, which one process counts up once for each."""

    def saved_optimizer(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        saved = super().saved_optimizer(optimizer)
        steps = [entries["step"] for entries in saved["state"].values() if "step" in entries]
        for entries in saved["state"].values():
            entries |= {"step": steps[0]} if "step" in entries else {}
        return saved


@planted(COMPOSABLE, optim_load._Loading, "state", "optim_state.of_one_process_strided")
def moments_backwards(original: Any, loading: Any) -> dict[Any, dict[str, Any]]:
    """Moments of every second parameter are loaded backwards."""
    state: dict[Any, dict[str, Any]] = original(loading)
    for entries in list(state.values())[::2]:
        entries["exp_avg"] = entries["exp_avg"].flip(0)
    return state


@planted(COMPOSABLE, optim_load._Loading, "state", "optim_state.entries_of_users")
def numbers_in_float32(original: Any, loading: Any) -> dict[Any, dict[str, Any]]:
    """Numbers in tensors are loaded in 32 bits."""
    state: dict[Any, dict[str, Any]] = original(loading)
    for entries in state.values():
        entries |= {name: value.float() for name, value in entries.items() if getattr(value, "shape", None) == ()}
    return state


@planted(COMPOSABLE, model_state, "_after_save", "full_state_dict.extra_state")
def extra_state_is_dropped(original: Any, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Extra state of modules is not saved."""
    original(module, state, prefix, metadata)
    for key in [key for key in state if key.endswith("_extra_state")]:
        state[key] = {"factor": 1.0}


@planted(COMPOSABLE, model_state, "_after_load", "full_state_dict.modes")
def loading_trains(original: Any, module: nn.Module, incompatible: Any) -> None:
    """A model that is loaded is in training."""
    original(module, incompatible)
    module.train()


@planted(COMPOSABLE, root.Root, "recover", "exceptions.caught_in_no_sync")
def an_exception_ends_no_sync(original: Any, of: root.Root) -> None:
    """A pass that failed leaves the model as it is outside of `no_sync`."""
    failed = of._dirty
    original(of)
    for unit in of.units if failed else ():
        unit.sync_gradients = True


@fault("zero_grad.kept_gradients")
class OneGradientBuffer(Toy):
    """Each parameter has one buffer for its gradients, for good."""

    buffers: Mapping[str, torch.Tensor] = MappingProxyType({})

    def store(self, fqn: str, mean: torch.Tensor) -> None:
        super().store(fqn, mean)
        grad = self.shards[fqn].grad
        assert grad is not None
        self.buffers = {fqn: torch.empty_like(grad), **self.buffers}
        self.shards[fqn].grad = self.buffers[fqn].copy_(grad)


@fault("frozen.weights_alone")
class CurrentWhileTheFirstIs(Toy):
    """What is gathered is current as long as the first parameter is."""

    kept: Mapping[str, torch.Tensor] = MappingProxyType({})
    version = -1

    def gather(self, fqn: str) -> torch.Tensor:
        first = next(iter(self.shards.values()))._version
        self.kept = self.kept if first == self.version else {}
        self.version = first
        if fqn not in self.kept:
            self.kept = {**self.kept, fqn: super().gather(fqn)}
        return self.kept[fqn].clone()


@fault("mixed_precision.inputs_in_one_buffer")
class InputsByAddress(Toy):
    """A tensor that was cast once is not cast again, whatever was copied into it since."""

    cast: Mapping[tuple[int, ...], Any] = MappingProxyType({})

    def cast_inputs(self, value: Any) -> Any:
        addresses = tuple(tensor.data_ptr() for tensor in tensors_in(value))
        if torch.is_grad_enabled():
            return super().cast_inputs(value)
        self.cast = {addresses: super().cast_inputs(value), **self.cast}
        return self.cast[addresses]


@fault("sizes.two_dtypes_in_lockstep")
class ReducesInTheFirst(Toy):
    """All gradients of a model are reduced in the dtype of its first parameter."""

    def mean(self, fqn: str, contribution: torch.Tensor) -> torch.Tensor:
        first = next(iter(self.full.values())).dtype
        return super().mean(fqn, contribution.to(first)).to(contribution.dtype)


def recompute_by_forward(_original: Any, module: nn.Module, names: Any, *, reentrant: bool) -> None:
    """Recompute by calling the class's `forward`, so that no hook of a user runs again: no fault."""
    for part in map(module.get_submodule, names):
        forward = partial(type(part).forward, part)
        part.forward = partial(checkpoint, forward, use_reentrant=reentrant)


BY_FORWARD = with_fault(
    "fsdp_ref-wrapper",
    planting((fsdp_options, "checkpoint_modules", instead(recompute_by_forward))),
    "recomputes by forward",
    "faults_user_state:BY_FORWARD",
)
