"""Measures how sensitive a program is to roundings: a replay disturbed by as much as rounding may do shows it.

An a-priori bound over several iterations would need Lipschitz constants of the model and the optimizer. Instead the
same program runs twice, once with every reduced gradient, clipped gradient and stepped parameter moved by the largest
amount that another order of the same operations may move it, in directions drawn at random. How far the two runs are
apart anywhere is how far two correct implementations may be apart there, up to a factor for the directions not drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from fsdp_testing.cases.records import UNIT_ROUNDOFF, WrappingPlan
from fsdp_testing.oracle import unit_borders
from fsdp_testing.oracle.models import derive, dtype_name

STEP_ROUNDINGS = 16
"""Roundings of one optimizer step on one element: AdamW with weight decay does about fourteen."""


class Disturbance:
    """Moves numbers by up to `roundings` roundings, and parameters to other addresses.

    Args:
        seed: Directions of the roundings.
        roundings: How many; zero roundings move nothing.
        displaced: Parameters lie at odd offsets, as they do inside a flat parameter: a matrix product may be blocked by
            the alignment of its operands, and its last bits with it; at every fourth element of float32 it is not. And
            gradients are added up in two steps where a unit begins or ends (see `unit_borders`).

    Attributes:
        contributions: Of the latest backward: by the identity of a parameter of a unit, the sum of the absolute gradients
            that the calls of the unit contributed. Empty unless parameters are displaced.
    """

    def __init__(self, seed: int, roundings: float, *, displaced: bool = False) -> None:
        self.roundings = roundings
        self.displaced = displaced
        self._placed = 0
        self.contributions: dict[int, torch.Tensor] = {}
        self._borders: dict[int, list[unit_borders.Removable]] = {}
        # Of its own: the global one is seeded before every forward.
        self._generator = torch.Generator().manual_seed(derive(seed, "disturbance"))

    def place(self, values: torch.Tensor) -> torch.Tensor:
        """Return the same numbers elsewhere in memory, if parameters are displaced."""
        if not self.displaced or not values.is_contiguous():
            return values
        self._placed += 1
        # Odd, always: an even offset may be an aligned one, and the replay would show nothing (a false alarm taught that).
        offset = 1 + 2 * (self._placed % 4)
        room = values.new_empty(values.numel() + offset)
        return room[offset:].view(values.shape).copy_(values)

    def divided(self, replica: nn.Module, plan: WrappingPlan) -> nn.Module:
        """Return the replica; if parameters are displaced, its units are parts of the graph of their own.

        Args:
            replica: Unwrapped; what a plan before this one made of it is undone.
            plan: Names the units; with a policy every module may be one.
        """
        # Before new ones are drawn: two borders at one place would part a sum twice.
        for border in self._borders.pop(id(replica), ()):
            border.remove()
        if self.displaced:
            self._borders[id(replica)] = unit_borders.draw(replica, plan, self.contributions)
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
                # What has no gradient is not stepped, so that there is nothing to round.
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
