"""Runs a case through an implementation on one rank.

It builds the model, wraps it, runs the program operation by operation, and reports results of operations, and its own
local pieces at marked points and at the end. An exception is recorded at the operation that raised it; the rank then stops
and reports at once, so that the pool does not wait for ranks that wait for this one.
"""

from __future__ import annotations

import ctypes
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fsdp_testing
from fsdp_testing.adapters import protocol
from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.adapters.protocol import Setup
from fsdp_testing.cases.operations import Batch, user_code
from fsdp_testing.cases.operations.operation import matching
from fsdp_testing.cases.records import (
    BufferObservation,
    Case,
    ObservedPiece,
    OperationResult,
    OptimizerObservation,
    ParameterObservation,
    RaisedError,
    RankObservation,
    Snapshot,
    plan,
)
from fsdp_testing.cases.records.schedule import builds_late
from fsdp_testing.errors import CollectiveMismatch, HarnessError
from fsdp_testing.oracle import models, one_process, optimizers
from fsdp_testing.oracle.kept_groups import group_of
from fsdp_testing.oracle.models import dtype_name
from fsdp_testing.oracle.setup import module_to_wrap, move_what_is_ignored, setup_among, setup_in_world
from fsdp_testing.oracle.ways import Carrier, DirectoryRefused, carried_in_directory
from fsdp_testing.ranks.ledger.late_delivery import deliver_late

_HOME = Path(fsdp_testing.__file__).parent
_HANDS_ON = {_HOME / "ranks" / "ledger" / name for name in ("interception.py", "late_delivery.py")}
"""Files through which calls of torch's C++ and results of collectives only pass."""

Values = dict[str, torch.Tensor]


class RankProgram:
    """One case on one rank, in the making."""

    late, garbage = True, True
    """Whether results of collectives arrive as late as they may, and fresh memory holds garbage."""

    def __init__(self, case: Case, adapter: Adapter, rank: int) -> None:
        self.case = case
        self.adapter = adapter
        self.rank = rank
        self.files = Path(tempfile.gettempdir())
        self.model: nn.Module = nn.Module()
        self.optimizer: torch.optim.Optimizer | None = None
        self.save_point: tuple[str, Any, Any] | None = None  # form, state of the model, of the optimizer
        self.results: list[OperationResult] = []
        self.snapshots: list[Snapshot] = []
        self.index = -1
        self.in_implementation = False

    def run(self, *, observe_all: bool = False) -> RankObservation:
        """Run the whole case; never raise for what the case or the implementation does.

        Args:
            observe_all: Take a snapshot after every operation instead of at marked points only.

        Collectives: those of the implementation; every rank runs the same case.
        """
        start = time.perf_counter()
        error: RaisedError | None = None
        try:
            # Rule out lucky passes: results arrive as late as allowed, fresh memory holds garbage.
            with (
                deliver_late() if self.late else nullcontext(),
                filled_with_garbage() if self.garbage else nullcontext(),
            ):
                self._run(observe_all=observe_all)
        # After the contexts: memory and collectives are normal again while the traceback is analysed.
        except (Exception, SystemExit) as raised:  # noqa: BLE001 - whatever a foreign implementation raises is a finding
            error = self.record(raised)
        return RankObservation(
            rank=self.rank,
            results=tuple(self.results),
            snapshots=tuple(self.snapshots),
            error=error,
            seconds=time.perf_counter() - start,
        )

    def _run(self, *, observe_all: bool) -> None:
        self.model = self._model_of(self.case, {})
        if not builds_late(self.case):
            self.build_optimizer()
        self.run_operations(observe_all=observe_all)

    def run_operations(self, *, observe_all: bool = False) -> None:
        """Run the case's operations on the model as it is, and take a snapshot at the end."""
        for planned in plan(self.case):
            # First: an exception from here on counts for this operation.
            self.index = planned.index
            if planned.void:
                continue
            values = planned.operation.run(self)
            if values:
                self.results.append(OperationResult(planned.index, values))
            if observe_all or planned.operation.observes:
                self.observe(getattr(planned.operation, "label", ""))
        self.index = len(self.case.program)
        self.observe("end")

    def observe(self, label: str) -> None:
        """Take a snapshot. Collectives: none, if the adapter observes locally."""
        self.snapshots.append(snapshot_of(self.adapter, self.model, self.optimizer, self.index, label))

    def build_optimizer(self) -> None:
        """Build the case's optimizer over the parameters that the implementation shows."""
        # A failure of torch's optimizer over the adapter's parameters before the program says nothing.
        with self._inside() if "build_optimizer" not in self.adapter.missing else nullcontext():
            self.optimizer = self.adapter.build_optimizer(self.model, partial(optimizers.build_optimizer, self.case))

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward as the implementation does; a loss that depends on no trainable parameter has none."""
        if loss.requires_grad:
            self.adapter.backward(self.model, loss)

    def zero_grad(self, *, set_to_none: bool) -> None:
        self.adapter.zero_grad(self.model, self.optimizer, set_to_none)

    def call(
        self,
        batch: Any,
        *,
        inner: bool = False,
        penalised: bool = False,
        leaves: list[torch.Tensor] | None = None,
    ) -> models.Forwarded:
        """Run the wrapped model forward on this rank's inputs.

        Args:
            batch: The inputs.
            inner: Call the module inside the wrapper, if there is a wrapper around it.
            penalised: Add the squared gradient by the inputs to the loss.
            leaves: A list to which inputs that get gradients are added.
        """
        inputs = self._inputs_of(batch)
        model = getattr(self.model, "module", self.model) if inner else self.model
        with self._inside():
            if penalised:
                return models.penalised(model, self.case, batch, self.rank, inputs)
            return models.forward(model, self.case, batch, self.rank, inputs, leaves)

    def _inputs_of(self, batch: Any) -> models.Inputs:
        """Return this rank's inputs."""
        return models.make_inputs(self.case, batch, self.rank)

    def plain_part(self, name: str) -> nn.Module:
        """Return a part of the model as it was before wrapping, built anew."""
        return models.build_model(self.case).get_submodule(name)

    def set_requires_grad(self, patterns: tuple[str, ...], flag: bool) -> None:
        """Set the flag on the parameters that match."""
        user_code.set_requires_grad(matching(self.adapter.named_parameters(self.model), patterns), patterns, flag)

    @property
    def dtype(self) -> torch.dtype:
        return models.dtype_of(self.case.model.dtype)

    def rebuild(self, flags: Mapping[str, bool]) -> None:
        """Rebuild and wrap the model, from other values.

        Args:
            flags: `requires_grad` by name, if different from a new model's.
        """
        self.model = self._model_of(replace(self.case, seed=self.case.seed + 1), flags)

    def _setup(self, case: Case, module: nn.Module) -> Setup:
        """Return the setup for wrapping the module. Collectives: those of `setup_in_world`."""
        return setup_in_world(case, module)

    def _model_of(self, case: Case, flags: Mapping[str, bool]) -> nn.Module:
        module, init_module = module_to_wrap(case, self.rank, flags)
        setup = replace(self._setup(case, module), init_module=init_module)
        move_what_is_ignored(module, setup)
        with self._inside():
            return self.adapter.wrap(module, setup)

    def train_in_one_process(self, batch: Batch, state: Any, saved: Any, flags: Mapping[str, bool]) -> tuple[Any, Any]:
        """Return a saved state of model and optimizer (None: not saved) after one step in one process."""
        steps = self.optimizer is not None
        carried = one_process.train_on(self.case, batch, one_process.Saved(state, saved), flags, steps=steps)
        return carried.model, carried.optimizer

    def saved_as(self, directory: bool) -> AbstractContextManager[Carrier]:
        """Yield the carrier of a saved state. Collectives: for a directory, a broadcast and a barrier."""
        return carried_in_directory(self.files) if directory else nullcontext(Carrier())

    def train_among(
        self,
        ranks: tuple[int, ...],
        case: Case,
        batch: Batch,
        saved: Carrier,
        flags: Mapping[str, bool],
        max_norm: float | None,
    ) -> None:
        """On some ranks load a saved state into a new model and optimizer, train a step, and save the result in its place.

        Collectives: a group is made, and the new state is sent by the first of `ranks`; every rank of the world calls.
        """
        # Outside the branch: every rank of the world takes part in making a group.
        group = group_of(ranks)
        if self.rank in ranks:
            new_rank, adapter = ranks.index(self.rank), self.adapter
            # Not the saved values, so that tensors that are not loaded show.
            module, init_module = module_to_wrap(replace(case, seed=case.seed + 2), new_rank, flags)
            setup = replace(setup_among(case, module, ranks, group), init_module=init_module)
            move_what_is_ignored(module, setup)
            with self._inside():
                model, optimizer = adapter.wrap(module, setup), None
                saved.source(group).load_model(adapter, model)
                if self.optimizer is not None:
                    optimizer = adapter.build_optimizer(model, partial(optimizers.build_optimizer, case))
                    saved.source(group).load_optimizer(adapter, model, optimizer)
                loss = models.forward(model, case, batch, new_rank, models.make_inputs(case, batch, new_rank)).loss
                if loss.requires_grad:
                    adapter.backward(model, loss)
                if max_norm is not None:
                    adapter.clip_grad_norm(model, max_norm, 2.0)
                if optimizer is not None:
                    adapter.step(model, optimizer)
                saved.save(adapter, model, optimizer, group)
                adapter.finish(model)
        # Outside the branch too: every rank gets the state that some ranks saved.
        saved.send(ranks[0])

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Mark that foreign code runs; the mark stays if that raises, so that the exception counts against it."""
        self.in_implementation = True
        yield
        self.in_implementation = False

    def record(self, raised: Exception | SystemExit) -> RaisedError:
        """Return what was raised in the current operation, and whether it is the implementation's fault."""
        # Mismatched collectives are the implementation's fault; the ledger only reports them first. So is a refused directory:
        # users meet that error too, and this harness only wraps it, since torch's own is not an Exception.
        if isinstance(raised, DirectoryRefused):
            ours = False
        elif isinstance(raised, HarnessError):
            ours = not isinstance(raised, CollectiveMismatch)
        else:
            ours = _raised_by_harness(raised) or (self.index < 0 and not self.in_implementation)
        return RaisedError(
            index=self.index,
            type_name=f"{type(raised).__module__}.{type(raised).__qualname__}".removeprefix("builtins."),
            message=str(raised),
            traceback="".join(traceback.format_exception(raised)),
            not_implementation_fault=ours,
            not_supported=isinstance(raised, NotImplementedError),
        )


def _raised_by_harness(raised: BaseException) -> bool:
    """Whether the innermost frame is the harness's own: its ledger or an adapter of ours.

    Built-in models and the training loop's changes of parameters are user code. An exception of torch's C++ in a call that
    the ledger only passes on is the implementation's.
    """
    frames = traceback.extract_tb(raised.__traceback__)
    while frames and Path(frames[-1].filename) in _HANDS_ON:
        frames.pop()
    if not frames:
        return False
    innermost = Path(frames[-1].filename)
    user_code_files = {_HOME / "cases" / "operations" / "user_code.py", _HOME / "oracle" / "one_process.py"}
    foreign = {_HOME / "cases" / "models", *user_code_files}
    return _HOME in innermost.parents and not foreign & {innermost, *innermost.parents}


def snapshot_of(
    adapter: Adapter, model: nn.Module, optimizer: torch.optim.Optimizer | None, index: int, label: str
) -> Snapshot:
    """Report what this rank has of parameters, gradients, optimizer state and buffers.

    Collectives: none if `adapter.observes_locally`; else those of its gathering, and every rank must call.
    """
    parameters = {fqn: _parameter(fqn, pieces) for fqn, pieces in adapter.local_pieces(model).items() if pieces}
    buffers = {
        fqn: BufferObservation(fqn, dtype_name(buffer.dtype), buffer.detach().clone())
        for fqn, buffer in adapter.named_buffers(model)
    }
    state = None
    if optimizer is not None and "optimizer_pieces" in adapter.capabilities:
        state = {fqn: _state(fqn, entries) for fqn, entries in adapter.optimizer_pieces(model, optimizer).items()}
    return Snapshot(index, label, parameters, buffers, state)


def _parameter(fqn: str, pieces: Iterable[protocol.Piece]) -> ParameterObservation:
    own = tuple(pieces)
    values = [(piece.start, piece.stop, piece.value) for piece in own if piece.value is not None]
    grads = [(piece.start, piece.stop, piece.grad) for piece in own if piece.grad is not None]
    return ParameterObservation(
        fqn=fqn,
        shape=tuple(own[0].shape),
        dtype=dtype_name(values[0][2].dtype) if values else "",
        requires_grad=own[0].requires_grad,
        pieces=tuple(_copied(*entry) for entry in values),
        grad_pieces=tuple(_copied(*entry) for entry in grads) if grads else None,
        grad_dtype=dtype_name(grads[0][2].dtype) if grads else None,
    )


def _state(fqn: str, entries: Mapping[str, protocol.StateEntry]) -> OptimizerObservation:
    tensors, scalars = {}, {}
    for name, entry in entries.items():
        if isinstance(entry, tuple):
            tensors[name] = tuple(_copied(p.start, p.stop, p.value) for p in entry if p.value is not None)
        else:
            scalars[name] = float(entry)
    return OptimizerObservation(fqn, tensors, scalars)


# Copies: the implementation keeps using the memory that it shows.
def _copied(start: int, stop: int, value: torch.Tensor) -> ObservedPiece:
    return ObservedPiece(start, stop, value.detach().reshape(-1).clone())


_M_PERTURB = -6
# Freed memory is filled with this byte, new memory with its complement: about -5e303 in float64, -1.7e38 in float32.
_BYTE = 0x01


@contextmanager
def filled_with_garbage() -> Iterator[None]:
    """Have the C library fill memory that it hands out or takes back (glibc only).

    Left as they were: zeroed and very large memory, and a freed piece below 1 KiB that fits a request exactly (glibc
    returns such a piece from its cache per thread, before it fills; without that cache a training step takes 1.1 to 1.5
    times as long).
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        yield
        return
    # For all threads of the process; memory in use keeps its contents.
    set_option(_M_PERTURB, _BYTE)
    try:
        yield
    finally:
        set_option(_M_PERTURB, 0)
