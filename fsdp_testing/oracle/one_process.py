"""Trains a saved state in one process: loads it without sharding, trains a step, and saves again.

A world of one rank is a world of another size, and any rank can act as it alone. The model and the optimizer of this file are
torch's own, so that a state shows that one process cannot load, or trains differently.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fsdp_testing.base import compat
from fsdp_testing.cases.records import Batch, Case
from fsdp_testing.oracle import models, optimizers


@dataclass(frozen=True, slots=True)
class Saved:
    """A complete state, by original names.

    Attributes:
        model: Parameters and buffers.
        optimizer: `{"state": {fqn: {name: value}}, "param_groups": [...]}`; None if it is not saved.
    """

    model: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, Any] | None


def train_on(case: Case, batch: Batch, saved: Saved, trainable: Mapping[str, bool], *, steps: bool) -> Saved:
    """Load `saved` into a fresh model of one process, train one step there, and save that.

    Args:
        case: Says which model and optimizer.
        batch: Inputs; those of rank 0 are taken.
        saved: What ranks saved.
        trainable: `requires_grad` by name.
        steps: There is an optimizer.

    Returns:
        The same names and groups with the new values, on the CPU. Collectives: none.
    """
    # Not the values with which any rank began, so that tensors that are not loaded show.
    module = models.build_model(replace(case, seed=case.seed + 2))
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(trainable.get(name, parameter.requires_grad))
    module.load_state_dict(_with_versions(saved.model, module))
    optimizer = optimizers.build_optimizer(case, module.parameters()) if steps else None
    if optimizer is not None and saved.optimizer is not None:
        _load(optimizer, module, saved.optimizer)
    forwarded = models.forward(module, case, batch, 0, models.make_inputs(case, batch, 0))
    if forwarded.loss.requires_grad:
        forwarded.loss.backward()
    if optimizer is not None:
        optimizer.step()
    state = module.state_dict()
    model = _with_versions({name: state[name].detach().clone() for name in saved.model}, module)
    if optimizer is None or saved.optimizer is None:
        return Saved(model, None)
    own = {name: dict(optimizer.state[p]) for name, p in module.named_parameters() if p in optimizer.state}
    groups = copy.deepcopy(saved.optimizer["param_groups"])
    return Saved(model, {"state": {**saved.optimizer["state"], **copy.deepcopy(own)}, "param_groups": groups})


def _with_versions(values: Mapping[str, torch.Tensor], module: nn.Module) -> OrderedDict[str, torch.Tensor]:
    """Return a state with the versions of this module's own, which a plain dict has lost: without them, it is converted."""
    state = OrderedDict(values)
    setattr(state, compat.VERSIONS, getattr(module.state_dict(), compat.VERSIONS, None))
    return state


def _load(optimizer: torch.optim.Optimizer, module: nn.Module, saved: Mapping[str, Any]) -> None:
    """Load a state saved by name through the optimizer's own loading, which goes by index."""
    names = [name for name, _ in module.named_parameters()]
    state = optimizer.state_dict()
    for group, saved_group in zip(state["param_groups"], saved["param_groups"]):
        group["lr"] = saved_group["lr"]
    entries = {index: saved["state"][name] for index, name in enumerate(names) if saved["state"].get(name)}
    optimizer.load_state_dict({**state, "state": copy.deepcopy(entries)})
