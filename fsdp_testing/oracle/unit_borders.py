"""Adds gradients up where a unit begins and ends in the order of a graph that is parted there.

A sum of three numbers depends on which two are added first. Implementations hook the inputs of a unit, and let it
compute with views of its flat parameter that are made anew for each of its calls: a tensor that is used inside a unit
and twice around it gets its gradient as a + (b + c), and the weight of a module that a unit uses twice, in each of
three calls, as (a + b) + (c + d) + (e + f). A plain module adds from the left. Both are right.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from fsdp_testing.cases.records import WrappingPlan
from fsdp_testing.oracle.models import map_tensors

Contributions = dict[int, torch.Tensor]
"""Sums of absolute gradients, in float64, by the identity of the parameter."""


class Removable(Protocol):
    """A registered hook."""

    def remove(self) -> None:
        """Take the hook off again."""


def draw(replica: nn.Module, plan: WrappingPlan, contributions: Contributions | None = None) -> list[Removable]:
    """Part the graph of `replica` at the units of `plan`, and return the hooks that do it.

    Args:
        replica: Unwrapped.
        plan: Names the units; with a policy every module may be one.
        contributions: Gets the absolute gradient that each call of a unit gives to each of its parameters added.
    """
    noted = {} if contributions is None else contributions
    modules = dict(replica.named_modules(remove_duplicate=False))
    names = plan.units if plan.policy is None else [name for name in modules if name]
    units = {id(modules[name]): modules[name] for name in names}
    return [hook for unit in units.values() for hook in _part(unit, set(units) - {id(unit)}, noted)]


def _part(unit: nn.Module, other_units: set[int], noted: Contributions) -> Iterator[Removable]:
    own = list(_modules_of(unit, other_units))

    def begin(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        # Anew for each call, as implementations make theirs.
        _give_views(own, noted)
        return map_tensors(_behind_a_node, (args, dict(kwargs)))

    def end(*_: object) -> None:
        for module in own:
            for name in module._parameters:
                vars(module).pop(name, None)

    yield unit.register_forward_pre_hook(begin, with_kwargs=True)
    # Also after an exception: a view of a call that is over must not be used by the next one.
    yield unit.register_forward_hook(end, always_call=True)


def _modules_of(unit: nn.Module, other_units: set[int]) -> Iterator[nn.Module]:
    """Yield the modules of a unit, without those of the units inside it."""
    yield unit
    for child in unit.children():
        if id(child) not in other_units:
            yield from _modules_of(child, other_units)


def _give_views(modules: list[nn.Module], noted: Contributions) -> None:
    """Put views before the parameters: an attribute in the module's own dictionary is found first."""
    views: dict[int, torch.Tensor] = {}
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in views:
                view = views[id(parameter)] = parameter.view_as(parameter)
                if view.requires_grad:
                    view.register_hook(partial(_note, noted, id(parameter)))
            vars(module)[name] = views[id(parameter)]


def _note(noted: Contributions, key: int, gradient: torch.Tensor) -> None:
    size = gradient.detach().abs().double()
    noted[key] = noted[key] + size if key in noted else size


def _behind_a_node(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view_as(tensor) if tensor.requires_grad else tensor
