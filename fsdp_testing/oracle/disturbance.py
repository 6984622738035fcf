"""Measures how sensitive a program is to roundings, by a replay with disturbances as large as roundings may be.

An a-priori bound over several iterations would need Lipschitz constants of the model and the optimizer. Instead the
same program runs twice, once with every reduced gradient, clipped gradient and stepped parameter moved by the largest
amount that another order of the same operations may move it, in directions drawn at random. How far the two runs are
apart anywhere is how far two correct implementations may be apart there, up to a factor for the directions not drawn.

A sum of three numbers depends on which two are added first. Implementations hook the inputs of a unit, and let it
compute with views of its flat parameter that are made anew for each of its calls: a tensor that is used inside a unit
and twice around it gets its gradient as a + (b + c), and the weight of a module that a unit uses twice, in each of
three calls, as (a + b) + (c + d) + (e + f). A plain module adds from the left. Both are right. So is DDP, which puts a node of
the graph behind the whole model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from fsdp_testing.cases.records import UNIT_ROUNDOFF, WrappingPlan
from fsdp_testing.oracle.models import derive, dtype_name, map_tensors

STEP_ROUNDINGS = 16
"""Roundings of one optimizer step on one element: AdamW with weight decay does about fourteen."""


class Disturbance:
    """Moves numbers by up to `roundings` roundings, and parameters to other addresses.

    Args:
        seed: Directions of the roundings.
        roundings: How many; zero roundings move nothing.
        displaced: Parameters lie at odd offsets, as they do inside a flat parameter: a matrix product may be blocked by
            the alignment of its operands, and its last bits with it; at every fourth element of float32 it is not. And
            gradients are added up in two steps where a unit begins or ends.
        products: Inner products of layers that tensor parallelism cuts are moved, by a rounding for each of their summands.
            Default: if `roundings` move anything.

    Attributes:
        contributions: Of the latest backward: by the identity of a parameter of a unit, the sum of the absolute gradients
            that the calls of the unit contributed. Empty unless parameters are displaced.
    """

    def __init__(self, seed: int, roundings: float, *, displaced: bool = False, products: bool | None = None) -> None:
        self.roundings = roundings
        self._moves_products = bool(roundings) if products is None else products
        self.displaced = displaced
        self._placed = 0
        self.contributions: dict[int, torch.Tensor] = {}
        self._borders: dict[int, list[Removable]] = {}
        # Of its own: the global one is seeded before every forward.
        self._generator = torch.Generator().manual_seed(derive(seed, "disturbance"))

    def place(self, values: torch.Tensor) -> torch.Tensor:
        """Return the same numbers elsewhere in memory, if parameters are displaced."""
        if not self.displaced or not values.is_contiguous():
            return values
        self._placed += 1
        # Always odd: an even offset may be aligned, and the replay would show nothing (this once caused a false alarm).
        offset = 1 + 2 * (self._placed % 4)
        room = values.new_empty(values.numel() + offset)
        return room[offset:].view(values.shape).copy_(values)

    def factors(self, values: torch.Tensor, summands: int) -> torch.Tensor:
        """Return factors of inner products, moved by a rounding for each of their summands if products are moved."""
        if not (self._moves_products and summands):
            return values
        return values * (1 + self._signs(values) * summands * UNIT_ROUNDOFF[dtype_name(values.dtype)])

    def divided(self, replica: nn.Module, plan: WrappingPlan) -> nn.Module:
        """Return the replica; if parameters are displaced, its units are parts of the graph of their own.

        Args:
            replica: Unwrapped; changes by an earlier plan are undone.
            plan: Names the units; with a policy every module may be one.
        """
        # Before new borders are drawn: two borders at one place would split a sum twice.
        for border in self._borders.pop(id(replica), ()):
            border.remove()
        if self.displaced:
            self._borders[id(replica)] = [
                *draw_borders(replica, plan, self.contributions),
                replica.register_forward_hook(lambda _module, _args, output: map_tensors(_behind_a_node, output)),
            ]
        return replica

    def gradient(self, mean: torch.Tensor, magnitude: torch.Tensor, largest: float) -> torch.Tensor:
        """Return a reduced gradient moved by `roundings` roundings of numbers as large as `largest`.

        Args:
            mean: The gradient.
            magnitude: Per element the size of its summands; where it is exactly 0 nothing was added up.
            largest: Largest summand of any parameter's gradient: a gradient may be the small difference of large
                numbers, as that of an attention key's bias is.
        """
        if not self.roundings or not mean.numel():
            return mean
        reach = self.roundings * UNIT_ROUNDOFF[dtype_name(mean.dtype)] * largest
        return mean + self._signs(mean) * reach * (magnitude != 0)

    def step(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Move parameters by what the optimizer's own roundings may do."""
        if not self.roundings:
            return
        with torch.no_grad():
            for parameter in parameters.values():
                # A parameter without gradient is not stepped, so nothing is rounded.
                if parameter.is_floating_point() and parameter.grad is not None:
                    unit = UNIT_ROUNDOFF[dtype_name(parameter.dtype)]
                    parameter.mul_(1 + self._signs(parameter) * STEP_ROUNDINGS * unit)

    def clip(self, parameters: Iterable[nn.Parameter], count: int) -> None:
        """Scale clipped gradients by what a norm of `count` elements, added in another order, may do."""
        if not self.roundings:
            return
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(1 + (count + 4) * UNIT_ROUNDOFF[dtype_name(parameter.dtype)])

    def _signs(self, like: torch.Tensor) -> torch.Tensor:
        drawn = torch.randint(0, 2, like.shape, generator=self._generator)
        return (2 * drawn - 1).to(like.dtype)


NO_DISTURBANCE = Disturbance(0, 0.0)


Contributions = dict[int, torch.Tensor]
"""Sums of absolute gradients, in float64, by the identity of the parameter."""


class Removable(Protocol):
    """A registered hook."""

    def remove(self) -> None:
        """Remove the hook."""


def draw_borders(replica: nn.Module, plan: WrappingPlan, contributions: Contributions | None = None) -> list[Removable]:
    """Split the graph of `replica` at the units of `plan`, and return the hooks that do it.

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
        # New views for each call, as implementations make them.
        _give_views(own, noted)
        return map_tensors(_behind_a_node, (args, dict(kwargs)))

    def end(*_: object) -> None:
        for module in own:
            for name in module._parameters:
                vars(module).pop(name, None)

    yield unit.register_forward_pre_hook(begin, with_kwargs=True)
    # Also after an exception: the next call must not use a view of an ended call.
    yield unit.register_forward_hook(end, always_call=True)


def _modules_of(unit: nn.Module, other_units: set[int]) -> Iterator[nn.Module]:
    """Yield the modules of a unit, without the units inside it."""
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
