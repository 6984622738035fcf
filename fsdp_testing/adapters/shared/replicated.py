"""Saves and loads replicated state, as without data parallelism."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from fsdp_testing.adapters.shared import naming
from fsdp_testing.base.compat import VERSIONS, versions_of
from fsdp_testing.errors import InvalidArgument


def full_state_dict(model: nn.Module) -> Mapping[str, torch.Tensor]:
    """Return the unwrapped module's `state_dict`, by original names. Collectives: none."""
    state = naming.unwrapped(model).state_dict()
    result = OrderedDict((naming.original(fqn), _copied(value)) for fqn, value in state.items())
    return with_versions(result, state, naming.original)


def _copied(value: Any) -> Any:
    # A deep copy of a tensor would copy all of its storage. What is no tensor is extra state.
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def load_full_state_dict(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Call the unwrapped module's `load_state_dict`, which refuses state that does not fit. Collectives: none."""
    inside = naming.unwrapped(model)
    own = {naming.original(fqn): fqn for fqn in inside.state_dict()}
    modules = {naming.original(fqn): fqn for fqn, _ in inside.named_modules()}
    renamed = OrderedDict((own.get(fqn, fqn), tensor) for fqn, tensor in state.items())
    inside.load_state_dict(with_versions(renamed, state, lambda fqn: modules.get(fqn, fqn)))


def with_versions(state: OrderedDict[str, Any], source: Any, name: Callable[[str], str]) -> OrderedDict[str, Any]:
    """Return `state` with what `source` knows of modules, as `nn.Module.state_dict` keeps it: their versions, by name."""
    versions = versions_of(source)
    if versions is not None:
        vars(state)[VERSIONS] = OrderedDict((name(fqn), of_module) for fqn, of_module in versions.items())
    return state


def full_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Mapping[str, Any]:
    """Return the optimizer's state by original name instead of by index; entries of no parameter stay. Collectives: none."""
    named = dict(naming.named_parameters(model))
    names = {parameter: fqn for fqn, parameter in named.items()}
    state = {fqn: copy.deepcopy(optimizer.state[p]) for fqn, p in named.items() if p in optimizer.state}
    entries: Mapping[Any, Any] = optimizer.state
    state |= {key: copy.deepcopy(value) for key, value in entries.items() if isinstance(key, str)}
    groups = [{**group, "params": [names[p] for p in group["params"]]} for group in optimizer.param_groups]
    return {"state": state, "param_groups": groups}


def load_full_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load state and settings into the parameters of these names; entries of no parameter are loaded unchanged.

    Collectives: none.

    Raises:
        InvalidArgument: The groups name parameters that the model does not have; all are listed.
    """
    named = dict(naming.named_parameters(model))
    names = {parameter: fqn for fqn, parameter in named.items()}
    unknown = sorted({fqn for group in state["param_groups"] for fqn in group["params"]} - named.keys())
    if unknown:
        raise InvalidArgument(
            f"optimizer state: expected the model's parameters, got {unknown}. Load this model's state."
        )
    for fqn, parameter in named.items():
        if fqn in state["state"]:
            optimizer.state[parameter] = copy.deepcopy(state["state"][fqn])
        else:
            # Saved before the first step: the state since then is dropped, as in torch's own `load_state_dict`.
            optimizer.state.pop(parameter, None)
    entries: dict[Any, Any] = optimizer.state
    for key in state["state"].keys() - named.keys():
        entries[key] = copy.deepcopy(state["state"][key])
    kept = {fqn: group for group in state["param_groups"] for fqn in group["params"]}
    for group in optimizer.param_groups:
        for parameter in group["params"][:1]:
            settings = {key: value for key, value in kept[names[parameter]].items() if key != "params"}
            group.update(copy.deepcopy(settings))


METHODS: Mapping[str, Any] = {
    "full_state_dict": full_state_dict,
    "load_full_state_dict": load_full_state_dict,
    "full_optimizer_state": full_optimizer_state,
    "load_full_optimizer_state": load_full_optimizer_state,
}
"""These functions under the adapter's names."""
