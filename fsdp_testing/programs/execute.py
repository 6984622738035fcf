"""How does one rank run a case through an implementation?

It builds the model, wraps it, runs the program operation by operation, and reports what it sees: results of operations,
and its own local pieces at marked points and at the end. An exception is recorded at the operation that raised it; the
rank then stops and says so at once, so that the pool does not wait for ranks that wait for this one.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

import fsdp_testing
from fsdp_testing.errors import CollectiveMismatch, HarnessError, InvalidImplementation
from fsdp_testing.implementations.adapter import Adapter
from fsdp_testing.implementations.protocol import Setup
from fsdp_testing.ledger.late_delivery import deliver_late
from fsdp_testing.programs import models, user_code
from fsdp_testing.programs.fresh_memory import filled_with_garbage
from fsdp_testing.programs.observe import snapshot_of
from fsdp_testing.records import (
    BuildOptimizer,
    Case,
    Clip,
    EditFullParameters,
    Forward,
    ForwardBackward,
    Freeze,
    Observe,
    Operation,
    OperationResult,
    RaisedError,
    RankObservation,
    SetLr,
    Snapshot,
    Step,
    Thaw,
    ZeroGrad,
    plan,
)
from fsdp_testing.records.legality import builds_late

_HOME = Path(fsdp_testing.__file__).parent
_HANDS_ON = {_HOME / "ledger" / name for name in ("interception.py", "late_delivery.py")}
"""Files through which calls of torch's C++ and results of collectives only pass."""

Values = dict[str, torch.Tensor]
SetupMaker = Callable[[Case, nn.Module], Setup]
O = TypeVar("O", bound=Operation)  # noqa: E741 - the operation that a handler takes


class RankProgram:
    """One case on one rank, in the making."""

    def __init__(self, case: Case, adapter: Adapter, rank: int, make_setup: SetupMaker) -> None:
        self.case = case
        self.adapter = adapter
        self.rank = rank
        self.make_setup = make_setup
        self.model: nn.Module = nn.Module()
        self.optimizer: torch.optim.Optimizer | None = None
        self.results: list[OperationResult] = []
        self.snapshots: list[Snapshot] = []
        self.index = -1
        self.in_implementation = False

    def run(self, *, observe_all: bool = False) -> RankObservation:
        """Runs the whole case; never raises for what the case or the implementation does.

        Args:
            observe_all: Take a snapshot after every operation instead of at marked points only.

        Collectives: those of the implementation; every rank runs the same case.
        """
        start = time.perf_counter()
        error: RaisedError | None = None
        try:
            # Luck is to help nobody: neither a quick network nor memory that holds zeros or yesterday's weights.
            with deliver_late(), filled_with_garbage():
                self._run(observe_all=observe_all)
        except Exception as raised:  # noqa: BLE001 - whatever a foreign implementation raises is a finding
            error = self._record(raised)
        return RankObservation(
            rank=self.rank,
            results=tuple(self.results),
            snapshots=tuple(self.snapshots),
            error=error,
            seconds=time.perf_counter() - start,
        )

    def _run(self, *, observe_all: bool) -> None:
        module = models.build_model(self.case)
        setup = self.make_setup(self.case, module)
        with self._inside():
            self.model = self.adapter.wrap(module, setup)
        if not builds_late(self.case):
            self.build_optimizer()
        for planned in plan(self.case):
            self.index = planned.index
            if planned.void:
                continue
            values = HANDLERS[type(planned.operation)](self, planned.operation)
            if values:
                self.results.append(OperationResult(planned.index, values))
            if observe_all or isinstance(planned.operation, Observe):
                self.look(getattr(planned.operation, "label", ""))
        self.index = len(self.case.program)
        self.look("end")

    def look(self, label: str) -> None:
        """Takes a snapshot. Collectives: none, if the adapter observes locally."""
        self.snapshots.append(snapshot_of(self.adapter, self.model, self.optimizer, self.index, label))

    def build_optimizer(self) -> None:
        """Builds the case's optimizer over the parameters that the implementation shows."""
        # Of torch's own optimizer over what the adapter shows, a failure before the program says nothing.
        with self._inside() if "build_optimizer" not in self.adapter.missing else nullcontext():
            self.optimizer = self.adapter.build_optimizer(self.model, partial(models.build_optimizer, self.case))

    def backward(self, loss: torch.Tensor) -> None:
        """Runs backward as the implementation does; a loss that nothing trainable went into has none."""
        if loss.requires_grad:
            self.adapter.backward(self.model, loss)

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Clears gradients as the implementation does."""
        self.adapter.zero_grad(self.model, self.optimizer, set_to_none)

    def call(self, batch: Any) -> models.Forwarded:
        """Runs the wrapped model forward on this rank's inputs."""
        inputs = models.make_inputs(self.case, batch, self.rank)
        with self._inside():
            return models.forward(self.model, self.case, batch, self.rank, inputs)

    def set_requires_grad(self, patterns: tuple[str, ...], flag: bool) -> None:
        """Sets the flag on the parameters that match."""
        found = models.matching(self.adapter.named_parameters(self.model), patterns)
        if not found:
            raise InvalidImplementation(
                f"{self.adapter.name}.named_parameters: expected a parameter that matches {patterns}, got none. "
                "Name parameters as the unwrapped module does, or do not claim `thawed_parameters`."
            )
        user_code.set_requires_grad([parameter for _, parameter in found], flag)

    def _inside(self) -> _Inside:
        return _Inside(self)

    def _record(self, raised: Exception) -> RaisedError:
        lines = traceback.format_exception(raised)
        return RaisedError(
            index=self.index,
            type_name=f"{type(raised).__module__}.{type(raised).__qualname__}".removeprefix("builtins."),
            message=str(raised),
            traceback="".join(lines),
            not_implementation_fault=self._is_not_implementation_fault(raised),
            not_supported=isinstance(raised, NotImplementedError),
        )

    def _is_not_implementation_fault(self, raised: Exception) -> bool:
        """Whether the adapter or the harness is at fault, so that nothing is known of the implementation."""
        if isinstance(raised, HarnessError):
            # Collectives that do not match are the implementation's; the ledger only says so first.
            return not isinstance(raised, CollectiveMismatch)
        return _raised_by_harness(raised) or (self.index < 0 and not self.in_implementation)


def _raised_by_harness(raised: Exception) -> bool:
    """Whether the innermost frame is the harness's own: its ledger or an adapter of ours.

    Models of the zoo and what a training loop does to parameters are user code, and what the museum plants is the
    implementation's. So is what torch's C++ raises in a call that the ledger only hands on.
    """
    frames = traceback.extract_tb(raised.__traceback__)
    while frames and Path(frames[-1].filename) in _HANDS_ON:
        frames.pop()
    if not frames:
        return False
    innermost = Path(frames[-1].filename)
    programs = _HOME / "programs"
    foreign = {_HOME / "zoo", _HOME / "museum", programs / "user_code.py", programs / "one_process.py"}
    return _HOME in innermost.parents and not foreign & {innermost, *innermost.parents}


class _Inside:
    """Marks that foreign code runs; the mark stays if it raises, so that the exception is put to its account."""

    def __init__(self, program: RankProgram) -> None:
        self._program = program

    def __enter__(self) -> None:
        self._program.in_implementation = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._program.in_implementation = False


def _forward_backward(program: RankProgram, operation: ForwardBackward) -> Values:
    with program.adapter.no_sync(program.model) if operation.no_sync else nullcontext():
        forwarded = program.call(operation.batch)
        values = forwarded.values()
        program.backward(forwarded.loss)
    return values


def _forward(program: RankProgram, operation: Forward) -> Values:
    contexts = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
    program.model.train(operation.mode == "train")
    try:
        with contexts.get(operation.mode, nullcontext)():
            return program.call(operation.batch).values()
    finally:
        program.model.train()


def _zero_grad(program: RankProgram, operation: ZeroGrad) -> None:
    program.zero_grad(set_to_none=operation.set_to_none)


def _step(program: RankProgram, _operation: Step) -> None:
    if program.optimizer is not None:
        program.adapter.step(program.model, program.optimizer)


def _build_optimizer(program: RankProgram, _operation: BuildOptimizer) -> None:
    program.build_optimizer()


def _set_lr(program: RankProgram, operation: SetLr) -> None:
    if program.optimizer is not None:
        models.set_lr(program.optimizer, operation.lr)


def _freeze(program: RankProgram, operation: Freeze) -> None:
    program.set_requires_grad(operation.patterns, False)


def _thaw(program: RankProgram, operation: Thaw) -> None:
    program.set_requires_grad(operation.patterns, True)


def _clip(program: RankProgram, operation: Clip) -> Values:
    norm = program.adapter.clip_grad_norm(program.model, operation.max_norm, operation.norm_type)
    return {"total_norm": norm.detach().clone()}


def _edit(program: RankProgram, operation: EditFullParameters) -> None:
    with program.adapter.full_parameters(program.model, writeback=operation.writeback) as full:
        user_code.scale(
            [parameter for _, parameter in models.matching(full.items(), operation.patterns)], operation.factor
        )


def _observe(_program: RankProgram, _operation: Observe) -> None:
    """The snapshot is taken by the loop."""


HANDLERS: dict[type[Operation], Callable[[RankProgram, Any], Values | None]] = {
    ForwardBackward: _forward_backward,
    Forward: _forward,
    ZeroGrad: _zero_grad,
    Step: _step,
    BuildOptimizer: _build_optimizer,
    SetLr: _set_lr,
    Freeze: _freeze,
    Thaw: _thaw,
    Clip: _clip,
    EditFullParameters: _edit,
    Observe: _observe,
}
"""What each operation does to a wrapped model. The oracle has its own table of the same keys."""
