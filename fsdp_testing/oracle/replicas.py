"""Copies a module for each rank, part by part, so that it computes with parameters given to it.

`copy.deepcopy` looks at every hook table and every number of every module. Modules of drawn trees keep nothing but
parameters, buffers, modules and plain data, so that theirs can be copied at a tenth of the price; any other model is
copied deeply.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fsdp_testing.cases.models.tree_modules import LEAVES, Tree, TreeGroup

_PLAIN = frozenset({Tree, TreeGroup, *LEAVES.values()})


def replica_of(module: nn.Module, parameters: Mapping[int, nn.Parameter]) -> nn.Module:
    """Return a copy of `module` with buffers of its own.

    Args:
        module: Unwrapped, as built.
        parameters: By identity of each of its parameters the one that stands for it in the copy.
    """
    if all(type(inner) in _PLAIN for inner in module.modules()):
        return _copied(module, parameters, {}, {})
    return copy.deepcopy(module, dict(parameters))


def _copied(
    module: nn.Module,
    parameters: Mapping[int, nn.Parameter],
    modules: dict[int, nn.Module],
    buffers: dict[int, torch.Tensor],
) -> nn.Module:
    made = modules.get(id(module))
    if made is not None:
        return made
    # Entered before its parts are copied: a module with two names is one copy.
    made = modules[id(module)] = type(module).__new__(type(module))
    given = vars(module)
    fields: dict[str, Any] = {
        name: value.copy() if isinstance(value, (dict, set)) else value for name, value in given.items()
    }
    for name, parameter in given["_parameters"].items():
        fields["_parameters"][name] = None if parameter is None else parameters[id(parameter)]
    for name, buffer in given["_buffers"].items():
        fields["_buffers"][name] = None if buffer is None else buffers.setdefault(id(buffer), buffer.clone())
    for name, inner in given["_modules"].items():
        fields["_modules"][name] = None if inner is None else _copied(inner, parameters, modules, buffers)
    vars(made).update(fields)
    return made
