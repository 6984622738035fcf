"""What users do to modules besides training: `module.to`, `copy.deepcopy`."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import nn

from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.cases.records import (
    Batch,
    BuildOptimizer,
    Case,
    Move,
    Observe,
    RankObservation,
    Step,
)
from fsdp_testing.checks.suites.check import ADAMW, PLAIN_SGD, Place, Suite
from fsdp_testing.checks.suites.schedules import forward, iteration, iterations, micro_batch
from fsdp_testing.judging.case_runner import RunMode
from fsdp_testing.judging.checkers.copies import Copied, CopyingObservation, review_copies
from fsdp_testing.oracle import models, rank_jobs
from fsdp_testing.oracle.execute import RankProgram, snapshot_of
from fsdp_testing.ranks.pool import Failed
from fsdp_testing.ranks.pool.world import current_world

_COPY = "deepcopy"
"""Label of the observation at which the model is copied."""


class CopyingProgram(RankProgram):
    """A program that copies its model at a marked point and trains the copy before it goes on."""

    copied: Copied | None = None
    may_refuse = True

    def observe(self, label: str) -> None:
        """Take a snapshot, after the copy has done the next micro-batch and one step."""
        if label == _COPY:
            self.copied = self._copy(next(batch for op in self.case.program[self.index :] for batch in op.batches()))
        super().observe(label)

    def _copy(self, batch: Batch) -> Copied:
        try:
            twin: nn.Module = copy.deepcopy(self.model)
        except Exception as refused:  # whatever it raises, it refuses
            if not self.may_refuse:
                raise
            return Copied(f"{type(refused).__name__}: {refused}")
        inputs = models.make_inputs(self.case, batch, self.rank)
        forwarded = models.forward(twin, self.case, batch, self.rank, inputs)
        forwarded.loss.backward()
        snapshot = snapshot_of(self.adapter, twin, None, self.index, _COPY)
        # A large step of the copy: the original must not notice.
        parameters = [parameter for parameter in twin.parameters() if parameter.grad is not None]
        torch.optim.SGD(parameters, lr=1.0).step() if parameters else None
        return Copied("", forwarded.values(), snapshot)


def run_copying(adapter: Adapter, case: Case, observe_all: bool, may_refuse: bool = True) -> RankObservation | Failed:
    """Run the case, copying the model where it says so; if the copy may not be refused, what it raises counts.

    Collectives: those of the implementation; every rank of the world runs the same call.
    """
    program = CopyingProgram(case, adapter, current_world().rank)
    program.may_refuse = may_refuse
    seen = rank_jobs.run_program(program, observe_all)
    return seen if isinstance(seen, Failed) else seen.extended(CopyingObservation, copied=program.copied)


SUITE = Suite()


@SUITE.check("conversion.same_device", source="torch.nn.Module.to")
def _moved(place: Place) -> Iterable[Case]:
    """`module.to` the device where it is already changes nothing, before training and in the middle."""
    yield place.case("uneven", Move(), *iteration(0), Move(), *iteration(1), forward(5), optimizer=ADAMW)


@SUITE.check("conversion.dtype", source="torch.nn.Module.to; B078")
def _cast(place: Place) -> Iterable[Case]:
    """`module.to(dtype)` before the first forward: training happens in that dtype."""
    late = (BuildOptimizer(), *iterations(2))
    yield place.case("mlp", Move("float32"), *late, optimizer=ADAMW)
    yield place.case("uneven", Move("float64"), *late, optimizer=ADAMW, dtype="float32")


@SUITE.check("conversion.dtype_of_buffers", source="torch.nn.Module.to")
def _cast_buffers(place: Place) -> Iterable[Case]:
    """`module.to(dtype)` before the first forward casts floating buffers, and no others."""
    yield place.case("buffers", Move("float32"), BuildOptimizer(), *iterations(2))


@SUITE.check("conversion.dtype_later", source="torch.nn.Module.to; B078", needs={"dtype_cast_later"})
def _cast_later(place: Place) -> Iterable[Case]:
    """`module.to(dtype)` between iterations: training goes on in that dtype."""
    program = (BuildOptimizer(), *iteration(0), Move("float64"), BuildOptimizer(), *iterations(2, first=1))
    yield place.case("mlp", *program, optimizer=PLAIN_SGD, dtype="float32")


@SUITE.check("conversion.deepcopy", source="copy.deepcopy; B077", mode=RunMode(run_copying, review=review_copies))
def _copied(place: Place) -> Iterable[Case]:
    """A deep copy trains by itself and leaves the original alone, or is refused on every rank."""
    after = (micro_batch(1), Observe(), Step())
    yield place.case("mlp", *iteration(0), Observe(_COPY), *after, optimizer=PLAIN_SGD)
    yield place.case("mlp", Observe(_COPY), *after, optimizer=PLAIN_SGD)


_MUST_COPY = RunMode(run_copying, (False,), review=review_copies)


@SUITE.check("conversion.copied", source="copy.deepcopy; B077", needs={"deep_copies"}, mode=_MUST_COPY)
def _must_copy(place: Place) -> Iterable[Case]:
    """A deep copy is made, trains by itself and leaves the original alone."""
    yield place.case("mlp", *iteration(0), Observe(_COPY), micro_batch(1), Observe(), Step(), optimizer=PLAIN_SGD)
