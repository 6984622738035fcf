"""How is a training program drawn? Operation by operation, any of them at any place."""

from __future__ import annotations

import math
from collections.abc import Callable

from fsdp_testing.records import (
    AssignData,
    Batch,
    BuildOptimizer,
    Clip,
    EditFullParameters,
    Forward,
    ForwardBackward,
    Freeze,
    Interrupt,
    Move,
    Observe,
    Operation,
    Reload,
    ReplaceParameters,
    SetLr,
    SeveralForwards,
    Step,
    Thaw,
    UnshardFirst,
    ZeroGrad,
)
from fsdp_testing.strategies.choices import Choices
from fsdp_testing.strategies.features import Swarm

NORMS = (2.0, 1.0, math.inf, 3.0)
_MODES = {"op.forward": "train", "op.eval": "eval", "op.no_grad": "no_grad", "op.inference": "inference"}
_SCALES = (2.0, 0.25, 8.0)
_RATES = (0.02, 0.1, 0.003)


class OperationDrawer:
    """Draws operations for one case.

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
        self._choices = choices
        self._swarm = swarm
        self._size = size
        self._patterns = patterns
        self._branches = branches
        self._units = units
        self._modes = [mode for feature, mode in _MODES.items() if feature in swarm]
        self._makers = self._weighted()
        self._drawn = 0

    def _weighted(self) -> list[Callable[[], Operation]]:
        swarm = self._swarm
        makers: list[Callable[[], Operation]] = [self.forward_backward] * 5
        makers += [Step] * 4 if "op.step" in swarm else [Step]
        if "op.zero_grad" in swarm or "op.zero_grad_zeros" in swarm:
            makers += [self._zero_grad] * 2
        makers += [self._forward] * (2 if self._modes else 0)
        makers += [self._set_lr] if "op.set_lr" in swarm else []
        makers += [self._freeze, self._thaw] if "op.freeze" in swarm else []
        makers += [self._clip] * (2 if "op.clip" in swarm else 0)
        makers += [self._edit] if "op.edit" in swarm else []
        makers += [Observe] if "op.observe" in swarm else []
        makers += [BuildOptimizer] if "op.late_optimizer" in swarm else []
        makers += [Move] if "op.move" in swarm else []
        makers += [self._several_forwards] if "op.several_forwards" in swarm else []
        makers += [self._reload] if "op.reload" in swarm or "op.reload_sharded" in swarm else []
        makers += [self._interrupt] if "op.interrupt" in swarm else []
        makers += [self._unshard_first] if "op.unshard_first" in swarm else []
        makers += [self._assign_data] if "op.assign_data" in swarm else []
        makers += [self._replace] if "op.replace" in swarm else []
        return makers

    def program(self, longest: int) -> tuple[Operation, ...]:
        """Draws a program of about seven operations, with at least one forward in it."""
        drawn = [self.operation()]
        while len(drawn) < longest and self._choices.more(10):
            drawn.append(self.operation())
        if not any(isinstance(operation, (ForwardBackward, Forward)) for operation in drawn):
            drawn[self._choices.integer(0, len(drawn) - 1)] = self.forward_backward()
        if "op.cast" in self._swarm:
            # Where alone it has a meaning: before gradients, and before the optimizer holds the old parameters.
            drawn = [Move(self._choices.pick(("float32", "float64"))), BuildOptimizer(), *drawn[: longest - 2]]
        return tuple(drawn)

    def operation(self) -> Operation:
        """Draws one operation."""
        return self._choices.pick(self._makers)()

    def batch(self) -> Batch:
        """Draws a micro-batch."""
        choices, swarm = self._choices, self._swarm
        seed = self._next()
        rows: tuple[int, ...] = (1,) if "batch.one_row" in swarm and choices.chance(3) else (choices.integer(2, 4),)
        if "batch.uneven" in swarm and choices.chance(2):
            rows = tuple(choices.integer(1, 4) for _ in range(self._size))
        if "batch.empty" in swarm and choices.chance(3):
            rows = (0,) if choices.chance(4) else tuple(choices.integer(0, 2) for _ in range(self._size))
        scale = choices.pick(_SCALES) if "batch.scale" in swarm and choices.chance(3) else 1.0
        return Batch(seed, rows, self._usage(), scale)

    def _next(self) -> int:
        self._drawn += 1
        return self._drawn

    def _usage(self) -> tuple[tuple[bool, ...], ...]:
        if not self._branches or "batch.usage" not in self._swarm:
            return ()
        masks = self._size if "batch.usage_differs" in self._swarm and self._choices.chance(2) else 1
        return tuple(tuple(not self._choices.chance(2) for _ in range(self._branches)) for _ in range(masks))

    def forward_backward(self) -> ForwardBackward:
        """Draws a micro-batch with backward."""
        return ForwardBackward(self.batch(), no_sync="op.no_sync" in self._swarm and self._choices.chance(3))

    def _forward(self) -> Forward:
        return Forward(self.batch(), self._choices.pick(self._modes))

    def _several_forwards(self) -> SeveralForwards:
        batches = tuple(self.batch() for _ in range(self._choices.integer(2, 3)))
        return SeveralForwards(batches, self._choices.chance(2))

    def _reload(self) -> Reload:
        choices, swarm = self._choices, self._swarm
        optimizer = "op.reload_optimizer" in swarm and choices.chance(2)
        if "op.reload_sharded" in swarm and ("op.reload" not in swarm or choices.chance(2)):
            return Reload("sharded", optimizer)
        another = "op.reload_plan" in swarm and choices.chance(2)
        units = tuple(u for u in self._units if choices.chance(2)) if another else None
        through = (
            Batch(self._next(), (choices.integer(1, 4),)) if "op.reload_world" in swarm and choices.chance(2) else None
        )
        return Reload("full", optimizer, units, through)

    def _interrupt(self) -> Interrupt:
        choices = self._choices
        places = ["step", *(p for p, f in (("no_sync", "op.no_sync"), ("summon", "op.edit")) if f in self._swarm)]
        return Interrupt(self.batch(), choices.integer(0, 5), choices.chance(2), choices.pick(places))

    def _unshard_first(self) -> UnshardFirst:
        units = ("", *(unit for unit in self._units if self._choices.chance(3)))
        return UnshardFirst(self.batch(), units[1:] if self._choices.chance(3) else units, self._choices.chance(3))

    def _assign_data(self) -> AssignData:
        factor = self._choices.pick((0.5, -1.0, 1.25))
        return AssignData((self._choices.pick(self._patterns),), factor, self.batch())

    def _replace(self) -> ReplaceParameters:
        return ReplaceParameters((self._choices.pick(self._patterns),), self._choices.pick((0.5, -1.0, 1.25)))

    def _zero_grad(self) -> ZeroGrad:
        kinds = [kind for name, kind in (("op.zero_grad", True), ("op.zero_grad_zeros", False)) if name in self._swarm]
        return ZeroGrad(self._choices.pick(kinds))

    def _set_lr(self) -> SetLr:
        return SetLr(self._choices.pick(_RATES))

    def _freeze(self) -> Freeze:
        return Freeze((self._choices.pick(self._patterns),))

    def _thaw(self) -> Thaw:
        return Thaw((self._choices.pick(self._patterns),))

    def _clip(self) -> Clip:
        return Clip(self._choices.pick((0.5, 0.01, 1e6)), self._choices.pick(NORMS))

    def _edit(self) -> EditFullParameters:
        writeback = not self._choices.chance(4)
        return EditFullParameters(
            (self._choices.pick(self._patterns),), self._choices.pick((0.5, -1.0, 1.25)), writeback
        )
