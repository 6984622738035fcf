"""The optimizer and the gradients that it takes: clip, edit, clear, step, build, set the learning rate; and marked points."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fsdp_testing.cases.operations import user_code
from fsdp_testing.cases.operations.operation import GRADIENTS_ALIKE, OfPatterns, Operation, Silent, matching
from fsdp_testing.errors import InvalidRecord

if TYPE_CHECKING:
    import torch

    from fsdp_testing.cases.drawing.features import Swarm
    from fsdp_testing.cases.drawing.normal_form import ProgramContext
    from fsdp_testing.cases.drawing.operation_drawer import OperationDrawer
    from fsdp_testing.oracle.execute import RankProgram, Values
    from fsdp_testing.oracle.replay import Replay, Results


_RATES = (0.02, 0.1, 0.003)


@dataclass(frozen=True, slots=True)
class ZeroGrad(Silent):
    """Clears the gradients, by None or by zeros."""

    kind = "zero_grad"
    features = {"op.zero_grad": (), "op.zero_grad_zeros": ()}
    share = 2
    set_to_none: bool = True

    @classmethod
    def draw(cls, drawer: OperationDrawer) -> ZeroGrad:
        return cls(drawer.pick_by_feature({"op.zero_grad": True, "op.zero_grad_zeros": False}))

    def pending_after(self, pending: bool) -> bool:
        # Implementations differ on whether zeroed pending gradients are a gradient of zeros or none.
        return pending and not self.set_to_none

    def token(self) -> str:
        return self.kind if self.set_to_none else f"{self.kind}[zeros]"

    def script_lines(self, name: str) -> list[str] | None:
        return [f"(one.optimizer or one.model).zero_grad(set_to_none={self.set_to_none})"]

    def run(self, program: RankProgram) -> None:
        program.zero_grad(set_to_none=self.set_to_none)

    def replay(self, replay: Replay) -> None:
        if self.set_to_none:
            replay.clear_gradients()
            return
        for gradient in (p.grad for p in replay.parameters.values() if p.grad is not None):
            gradient.zero_()
        for pending in replay.pending:
            pending.scale(0.0)


@dataclass(frozen=True, slots=True)
class Step(Silent):
    """One optimizer step."""

    kind = "step"
    features = {"op.step": ()}
    forbidden_while_pending = GRADIENTS_ALIKE
    needs_optimizer = True
    steps = True
    writes_parameters = True

    @classmethod
    def weight(cls, swarm: Swarm) -> int:
        return 4 if "op.step" in swarm else 1

    def script_lines(self, name: str) -> list[str] | None:
        return ["one.optimizer.step()"]

    def run(self, program: RankProgram) -> None:
        if program.optimizer is not None:
            program.adapter.step(program.model, program.optimizer)

    def replay(self, replay: Replay) -> None:
        replay.step()


@dataclass(frozen=True, slots=True)
class IdleStep(Silent):
    """Creates an optimizer's missing state by a step on gradients of zeros with learning rate 0.

    No case contains it: one process runs it to find out whether an implementation has done the same.
    """

    needs_optimizer = True

    def run(self, program: RankProgram) -> None:
        """Do nothing: ranks never run it."""

    def replay(self, replay: Replay) -> None:
        optimizer = replay.optimizer
        if optimizer is None or optimizer.state:
            return
        gradients = [(parameter, parameter.grad) for parameter in replay.parameters.values()]
        rates = [group["lr"] for group in optimizer.param_groups]
        for parameter, _ in gradients:
            parameter.grad = parameter.new_zeros(parameter.shape) if parameter.requires_grad else None
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        optimizer.step()
        for group, rate in zip(optimizer.param_groups, rates):
            group["lr"] = rate
        for parameter, gradient in gradients:
            parameter.grad = gradient


@dataclass(frozen=True, slots=True)
class BuildOptimizer(Operation):
    """Builds the case's optimizer here instead of right after wrapping; a second one starts from empty state."""

    kind = "build_optimizer"
    needs = frozenset({"late_optimizer"})
    passes = None
    features = {"op.late_optimizer": ("late_optimizer",)}
    builds_optimizer = True

    def simpler(self) -> Iterator[Operation]:
        return iter(())

    def script_lines(self, name: str) -> list[str] | None:
        return ["one.optimizer = one.make_optimizer()"]

    def run(self, program: RankProgram) -> None:
        program.build_optimizer()

    def replay(self, replay: Replay) -> None:
        replay.build_optimizer()


@dataclass(frozen=True, slots=True)
class SetLr(Silent):
    """Sets the learning rate of every parameter group."""

    kind = "set_lr"
    features = {"op.set_lr": ()}
    needs_optimizer = True
    lr: float

    @classmethod
    def draw(cls, drawer: OperationDrawer) -> SetLr:
        return cls(drawer.choices.pick(_RATES))

    def script_lines(self, name: str) -> list[str] | None:
        return ["for group in one.optimizer.param_groups:", f"    group['lr'] = {self.lr!r}"]

    def run(self, program: RankProgram) -> None:
        self._set(program.optimizer)

    def replay(self, replay: Replay) -> None:
        self._set(replay.optimizer)

    def _set(self, optimizer: torch.optim.Optimizer | None) -> None:
        for group in optimizer.param_groups if optimizer is not None else ():
            if hasattr(group["lr"], "fill_"):  # a tensor, as schedules of torch treat it
                group["lr"].fill_(self.lr)
            else:
                group["lr"] = self.lr


@dataclass(frozen=True, slots=True)
class Observe(Silent):
    """A marked point: every rank reports its local pieces, without communication or change of state."""

    kind = "observe"
    features = {"op.observe": ()}
    observes = True
    label: str = ""

    def script_lines(self, name: str) -> list[str] | None:
        return []

    def run(self, program: RankProgram) -> None:
        """Do nothing: the caller that runs the program takes the snapshot."""

    def replay(self, replay: Replay) -> None:
        """Do nothing: the caller that runs the program takes the snapshot."""


_NORMS = (2.0, 1.0, math.inf, 3.0)


@dataclass(frozen=True, slots=True)
class Clip(Operation):
    """Clips the gradients by their total norm; `norm_type` is any p >= 1, infinity included."""

    kind = "clip"
    needs = frozenset({"clip_grad_norm"})
    passes = None
    features = {"op.clip": ("clip_grad_norm",)}
    share = 2
    forbidden_while_pending = GRADIENTS_ALIKE
    max_norm: float
    norm_type: float = 2.0

    @classmethod
    def draw(cls, drawer: OperationDrawer) -> Clip:
        return cls(drawer.choices.pick((0.5, 0.01, 1e6)), drawer.choices.pick(_NORMS))

    def normalise(self, context: ProgramContext) -> Operation | None:
        # torch's own clipping of plain tensors cannot take the largest of no elements.
        return replace(self, norm_type=2.0) if math.isinf(self.norm_type) and context.has_empty else self

    def simpler(self) -> Iterator[Operation]:
        yield Clip(0.5, 2.0)

    def token(self) -> str:
        return f"{self.kind}[inf]" if math.isinf(self.norm_type) else self.kind

    def script_lines(self, name: str) -> list[str] | None:
        return [f"yield {name!r}, one.clip({self.max_norm!r}, float({str(self.norm_type)!r}))"]

    def run(self, program: RankProgram) -> Values:
        norm = program.adapter.clip_grad_norm(program.model, self.max_norm, self.norm_type)
        return {"total_norm": norm.detach().clone()}

    def replay(self, replay: Replay) -> Results:
        from torch.nn.utils import clip_grad_norm_

        parameters = [parameter for parameter in replay.parameters.values() if parameter.grad is not None]
        norm = clip_grad_norm_(parameters, self.max_norm, self.norm_type)
        count = sum(parameter.numel() for parameter in parameters)
        replay.disturbance.clip(parameters, count)
        unit = replay.unit_roundoff(norm)
        why = f"{count} elements in the norm, in any order"
        values: Results = {}
        for rank in range(replay.size):
            values |= replay.result(rank, "total_norm", norm)
            replay.allow("result", "total_norm", float(norm.detach().abs()) * (count + 4) * unit, why, rank=rank)
        for fqn, parameter in replay.parameters.items():
            if parameter.grad is not None:
                replay.allow("gradient", fqn, replay.rounded(parameter.grad, count + 8), why)
        return values


EDITS = ("zeros", "none", "halved", "replaced", "given")


@dataclass(frozen=True, slots=True)
class EditGradients(OfPatterns):
    """Changes the reduced gradients of the parameters that match; other gradients stay.

    Attributes:
        patterns: Patterns of the parameters' names.
        edit: `zeros` and `halved` in place; `none` by `p.grad = None`; `replaced` by a new tensor with half the numbers; `given`
            by a new tensor of constants, also where there was no gradient.
    """

    kind = "edit_gradients"
    needs = frozenset({"gradient_edits"})
    passes = 0
    forbidden_while_pending = GRADIENTS_ALIKE
    edit: str = "zeros"

    def __post_init__(self) -> None:
        if self.edit not in EDITS:
            raise InvalidRecord(f"EditGradients.edit: expected one of {EDITS}, got {self.edit!r}. Choose one of them.")

    @classmethod
    def weight(cls, swarm: Swarm) -> int:
        return 0  # so that a campaign's seed still gives the same case; `run --pairs` asks every pair

    @classmethod
    def draw(cls, drawer: OperationDrawer) -> EditGradients:
        return cls(drawer.patterns(), drawer.choices.pick(EDITS))

    def simpler(self) -> Iterator[Operation]:
        yield replace(self, patterns=("*",))
        yield replace(self, edit="zeros")

    def token(self) -> str:
        return f"{self.kind}[{self.edit}]"

    def run(self, program: RankProgram) -> None:
        if "full_gradients" in program.case.wrapping.settings:
            with program.adapter.full_parameters(program.model, writeback=True) as full:
                gathered: Any = matching(full.items(), self.patterns)
                user_code.edit_gradients([parameter for _, parameter in gathered], self.edit)
            return
        chosen = matching(program.adapter.named_parameters(program.model), self.patterns)
        user_code.edit_gradients([parameter for _, parameter in chosen], self.edit)

    def replay(self, replay: Replay) -> None:
        chosen = matching(replay.parameters.items(), self.patterns)
        user_code.edit_gradients([parameter for _, parameter in chosen], self.edit)
