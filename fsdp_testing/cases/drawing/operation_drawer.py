"""Draws a training program: operation by operation, any of them at any place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from fsdp_testing.cases.drawing.choices import Choices
from fsdp_testing.cases.drawing.features import Swarm
from fsdp_testing.cases.operations import ALL, Batch, BuildOptimizer, Forward, ForwardBackward, Move, Operation

T = TypeVar("T")

_SCALES = (2.0, 0.25, 8.0)


class OperationDrawer:
    """Draws operations for one case, and their common parts.

    Args:
        choices: Source.
        swarm: Features that are on.
        size: Number of ranks.
        patterns: Patterns of parameter names that freezing, thawing and editing may use; the first is for all.
        branches: Number of usage branches of the model.
        units: Modules that may be units.
    """

    def __init__(
        self,
        choices: Choices,
        swarm: Swarm,
        size: int,
        patterns: tuple[str, ...],
        branches: int,
        units: tuple[str, ...] = (),
    ) -> None:
        self.choices = choices
        self.swarm = swarm
        self.units = units
        self._size = size
        self._patterns = patterns
        self._branches = branches
        self._chances = [operation for operation in ALL for _ in range(operation.weight(swarm))]
        self._drawn = 0

    def program(self, longest: int) -> tuple[Operation, ...]:
        """Draw a program of about seven operations, with at least one forward in it."""
        drawn = [self.operation()]
        while len(drawn) < longest and self.choices.more(10):
            drawn.append(self.operation())
        # One of these two, since they have a meaning in every case: the normal form may drop any other.
        if not any(isinstance(operation, ForwardBackward | Forward) for operation in drawn):
            drawn[self.choices.integer(0, len(drawn) - 1)] = ForwardBackward.draw(self)
        if "op.cast" in self.swarm:
            # Only here it has a meaning: before gradients, and before the optimizer is built from the old parameters.
            drawn = [Move(self.choices.pick(("float32", "float64"))), BuildOptimizer(), *drawn[: longest - 2]]
        return tuple(drawn)

    def operation(self) -> Operation:
        return self.choices.pick(self._chances).draw(self)

    def batch(self) -> Batch:
        choices, swarm = self.choices, self.swarm
        seed = self.next_seed()
        rows: tuple[int, ...] = (1,) if "batch.one_row" in swarm and choices.chance(3) else (choices.integer(2, 4),)
        if "batch.uneven" in swarm and choices.chance(2):
            rows = tuple(choices.integer(1, 4) for _ in range(self._size))
        if "batch.empty" in swarm and choices.chance(3):
            rows = (0,) if choices.chance(4) else tuple(choices.integer(0, 2) for _ in range(self._size))
        scale = choices.pick(_SCALES) if "batch.scale" in swarm and choices.chance(3) else 1.0
        return Batch(seed, rows, self._usage(), scale)

    def next_seed(self) -> int:
        """Return a number for inputs that no other operation of the program has."""
        self._drawn += 1
        return self._drawn

    def patterns(self) -> tuple[str, ...]:
        return (self.choices.pick(self._patterns),)

    def pick_by_feature(self, options: Mapping[str, T]) -> T:
        """Draw one of the options whose feature is on."""
        return self.choices.pick([option for feature, option in options.items() if feature in self.swarm])

    def _usage(self) -> tuple[tuple[bool, ...], ...]:
        if not self._branches or "batch.usage" not in self.swarm:
            return ()
        masks = self._size if "batch.usage_differs" in self.swarm and self.choices.chance(2) else 1
        return tuple(tuple(not self.choices.chance(2) for _ in range(self._branches)) for _ in range(masks))
