"""Training with a loss scaler: the loss is multiplied, gradients are divided again, and a step on an overflow is skipped.

A gradient that overflows shows in the shard of one rank alone. All ranks must skip that step and take the smaller scale;
otherwise shards of one model part without an error. Scales are powers of two, which round nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.cases.records import Case, Clip, Observe, Operation, RankObservation, Step, ZeroGrad
from fsdp_testing.checks.suites.check import (
    ADAMW,
    ODD,
    Check,
    accumulated,
    cases,
    check,
    iteration,
    iterations,
    micro_batch,
)
from fsdp_testing.checks.suites.optimizer_programs import GroupedProgram, GroupedReplay
from fsdp_testing.checks.suites.programs import Remark, RemarkedObservation, review_remarks
from fsdp_testing.errors import HarnessError
from fsdp_testing.judging.case_runner import RunMode
from fsdp_testing.oracle import models, rank_jobs
from fsdp_testing.oracle.execute import RankProgram
from fsdp_testing.oracle.replay import Replay, ReplayPoint

OVERFLOW, UNSCALED = "one gradient overflows", "gradients are unscaled"
"""Labels of the observations after which one element of a gradient becomes infinite, and before which gradients are divided."""
_OPTIONS: Mapping[str, Any] = {"init_scale": 2.0**8, "growth_interval": 2}


class LossScale:
    """The scale of one process: half after a step that was skipped, twice after two in a row that were not."""

    def __init__(self) -> None:
        self.factor = float(_OPTIONS["init_scale"])
        self.overflowed = self.unscaled = False
        self._steps = 0

    @property
    def of_gradients(self) -> float:
        """Return what gradients are multiplied by now."""
        return 1.0 if self.unscaled else self.factor

    def step(self) -> bool:
        """Return whether a step is made, and go on to the next scale; gradients stay unscaled."""
        made, self.overflowed, self.unscaled = not self.overflowed, False, True
        self._steps = self._steps + 1 if made else 0
        if not made:
            self.factor /= 2
        elif self._steps == _OPTIONS["growth_interval"]:
            self.factor, self._steps = 2 * self.factor, 0
        return made


class ScaledProgram(RankProgram):
    """A program that trains with the implementation's loss scaler, and remarks where its scale is another than one process's."""

    poisoned = 0
    """Index of the parameter whose gradient overflows."""

    def __init__(self, case: Case, adapter: Adapter, rank: int) -> None:
        super().__init__(case, replace(adapter, step=self._step), rank)
        self.scaler: Any = None
        self.expected = LossScale()
        self._remarks: list[Remark] = []
        self._poisoned: list[tuple[torch.Tensor, torch.Tensor]] = []

    def run(self, *, observe_all: bool = False) -> RankObservation:
        """Run the case. Collectives: those of the scaler, too."""
        observation = super().run(observe_all=observe_all)
        if observation.error is not None:
            return observation
        return observation.extended(RemarkedObservation, remarks=tuple(self._remarks))

    def _model_of(self, case: Case, flags: Mapping[str, bool]) -> nn.Module:
        model = super()._model_of(case, flags)
        with self._inside():
            self.scaler = self.adapter.grad_scaler(model, **_OPTIONS)
        return model

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward of the scaled loss."""
        self.expected.unscaled = False
        super().backward(self.scaler.scale(loss))

    def observe(self, label: str) -> None:
        """Divide the gradients before a snapshot, or spoil one after it, as the label says."""
        if label == UNSCALED and not self.expected.unscaled:
            self.scaler.unscale_(self.optimizer)
            self.expected.unscaled = True
            self._put_back()
        super().observe(label)
        if label == OVERFLOW:
            self.expected.overflowed = True
            self._poison()

    def _poison(self) -> None:
        """Let the first element of one parameter's gradient overflow, on the rank that holds it and its replicas alone."""
        if not self.adapter.observes_gradients:
            raise HarnessError(
                f"{self.adapter.name}: expected gradients that can be changed, got none. Give the adapter local_pieces."
            )
        fqn = [name for name, _ in models.build_model(self.case).named_parameters()][self.poisoned]
        for piece in self.adapter.local_pieces(self.model).get(fqn, ()):
            if piece.grad is not None and piece.start == 0 < piece.stop:
                first = piece.grad.view(-1)[:1]
                self._poisoned.append((first, first / self.expected.of_gradients))
                first.fill_(torch.inf)

    def _put_back(self) -> None:
        """Give the element its own value again: what the scaler has seen is noted, and the oracle spoils nothing."""
        for element, value in self._poisoned:
            element.copy_(value)
        self._poisoned.clear()

    def _step(self, _model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Step by the scaler, and look at its scale."""
        self.scaler.step(optimizer)
        self.scaler.update()
        self._put_back()
        self.expected.step()
        if (scale := self.scaler.get_scale()) != self.expected.factor:
            statement = f"the scale is {scale:g} after the step, expected {self.expected.factor:g}"
            self._remarks.append(Remark(self.index, "loss scale", statement))


class ScaledReplay(Replay):
    """What one process does: the gradients of the loss itself, reported as they are scaled, and steps left out."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.scale_of_loss = LossScale()
        super().__init__(*arguments, **options)

    def reduce_pending(self) -> None:
        """Note that gradients are scaled again."""
        super().reduce_pending()
        self.scale_of_loss.unscaled = False

    def step(self) -> None:
        """Step, unless a gradient overflowed."""
        if self.scale_of_loss.step():
            super().step()

    def _observed(self, index: int, *, pending: bool) -> ReplayPoint:
        label = getattr(self.case.program[index], "label", "") if index < len(self.case.program) else ""
        self.scale_of_loss.unscaled |= label == UNSCALED
        self.scale_of_loss.overflowed |= label == OVERFLOW
        point = super()._observed(index, pending=pending)
        for quantity, value in point.values.items():
            if quantity.kind == "gradient" and value is not None:
                value.mul_(self.scale_of_loss.of_gradients)
        return point


class ScaledGroups(GroupedProgram, ScaledProgram):
    """The same, with biases in a second group; the gradient of a bias overflows."""

    poisoned = -1


class ScaledGroupsReplay(GroupedReplay, ScaledReplay):
    """The oracle's run of it."""


SCALED_GROUPS = RunMode(
    rank_jobs.run_as, (ScaledGroups, {}), rank_jobs.expect_as, (ScaledGroupsReplay, {}), review=review_remarks
)
SCALED = RunMode(rank_jobs.run_as, (ScaledProgram, {}), rank_jobs.expect_as, (ScaledReplay, {}), review=review_remarks)


def _stepped(*before: Operation) -> tuple[Operation, ...]:
    return (*before, Step(), ZeroGrad())


CHECKS: tuple[Check, ...] = (
    check("loss_scaling.trains", "A loss scaler changes no step, whatever its scale is, in accumulations and after clipping too.",
          cases("mlp uneven", *_stepped(micro_batch(0), Observe()), *iterations(2, first=1),
                *_stepped(micro_batch(3), Observe(UNSCALED)), *_stepped(*accumulated(4, 5, 6)), *iteration(7), optimizer=ADAMW),
          cases("mlp", *iteration(0), *_stepped(micro_batch(1), Observe(UNSCALED), Clip(0.01)), *iteration(2),
                dtype="float32"),
          source="torch.amp.GradScaler", needs={"loss_scaling", "clip_grad_norm", "no_sync"}, sizes=ODD, mode=SCALED),
    check("loss_scaling.skips_together", "If the gradient of one rank overflows, no rank steps, and all take the smaller scale.",
          cases("mlp uneven", *iteration(0), *_stepped(micro_batch(1), Observe(OVERFLOW)), *iterations(3, first=2),
                *_stepped(micro_batch(5), Observe(OVERFLOW), Observe(UNSCALED)), *iteration(6), optimizer=ADAMW),
          source="torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler", needs={"loss_scaling"}, sizes=ODD,
          mode=SCALED, of_pieces=True),
    check("loss_scaling.groups", "If a gradient of any group of parameters overflows, no group is stepped.",
          cases("mlp", *iteration(0), *_stepped(micro_batch(1), Observe(OVERFLOW)), *iterations(2, first=2), optimizer=ADAMW),
          source="torch.amp.GradScaler", needs={"loss_scaling", "frozen_mixed_unit"}, mode=SCALED_GROUPS, of_pieces=True),
)  # fmt: skip
"""Loss scaling, as training in float16 needs it."""
