"""How does the oracle get a module for each rank that computes with parameters given to it? A copy, part by part.

`copy.deepcopy` looks at every hook table and every number of every module. Modules of drawn trees keep nothing but
parameters, buffers, modules and plain data, so that theirs can be copied at a tenth of the price; any other model is
copied deeply.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import nn

from fsdp_testing.zoo.tree_modules import LEAVES, Tree, TreeGroup

_PLAIN = frozenset({Tree, TreeGroup, *LEAVES.values()})


def replica_of(module: nn.Module, parameters: Mapping[int, nn.Parameter]) -> nn.Module:
    """Returns a copy of `module` with buffers of its own.

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
    made = modules[id(module)] = type(module).__new__(type(module))
    held = vars(module)
    kept = {name: value.copy() if isinstance(value, (dict, set)) else value for name, value in held.items()}
    kept["_parameters"] = {n: None if p is None else parameters[id(p)] for n, p in held["_parameters"].items()}
    kept["_buffers"] = {
        n: None if b is None else buffers.setdefault(id(b), b.clone()) for n, b in held["_buffers"].items()
    }
    kept["_modules"] = {
        n: None if m is None else _copied(m, parameters, modules, buffers) for n, m in held["_modules"].items()
    }
    vars(made).update(kept)
    return made
