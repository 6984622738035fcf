"""Programs that do more than a case's operations say, with the replay that does the same in one process.

Examples: a model is copied, or a part of it is replaced or called alone; an optimizer has some of the parameters; one replica
evaluates alone; a gradient is made infinite and clipped. A copy runs the micro-batch that the original runs next, from the same
values, and steps like it, so that the oracle's numbers for the original hold for the copy as well.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_testing.cases.operations import user_code
from fsdp_testing.cases.records import (
    Batch,
    Case,
    FailureKind,
    Finding,
    OperationResult,
    RankObservation,
    Snapshot,
    Step,
)
from fsdp_testing.judging.case_runner import RunMode
from fsdp_testing.judging.checkers import agreement
from fsdp_testing.judging.checkers.explain import finding, ranks_text
from fsdp_testing.oracle import models, optimizers, rank_jobs
from fsdp_testing.oracle.execute import RankProgram, snapshot_of
from fsdp_testing.oracle.quantities import Comparison, Expectation
from fsdp_testing.oracle.reduction import Reduced
from fsdp_testing.oracle.replay import Replay, ReplayPoint


@dataclass(frozen=True, slots=True)
class Copied:
    """The result of the copy on one rank.

    Attributes:
        refused: The error that refused it; empty if there is a copy.
        results: Loss and outputs of its micro-batch.
        snapshot: Its parameters and gradients afterwards.
        stepped: Its parameters after the optimizer's step; None if the case takes none.
        gradients: Whether the implementation shows gradients. If not, the step alone tells what they were.
    """

    refused: str
    results: Mapping[str, Any] = field(default_factory=dict)
    snapshot: Snapshot | None = None
    stepped: Snapshot | None = None
    gradients: bool = True


@dataclass(frozen=True, slots=True)
class CopyingObservation(RankObservation):
    """The report of a rank that also copied its model."""

    copied: Copied | None = None


def review_copies(
    case: Case, ranks: Sequence[RankObservation], expectation: Expectation, *, may_refuse: bool = True
) -> Finding | None:
    """Compare the copies with what the oracle expects of the original's next micro-batch.

    Args:
        case: The case that ran.
        ranks: The ranks' reports.
        expectation: The oracle's.
        may_refuse: Every rank may refuse the copy instead.
    """
    at = _copied_at(case)
    if at is None:
        return None  # a shortened case without a copy
    copies = [rank.copied if isinstance(rank, CopyingObservation) else None for rank in ranks]
    missing = tuple(rank for rank, copy in enumerate(copies) if copy is None)
    if missing:
        return _finding(case, at, missing, "nothing was copied")
    refused = tuple(rank for rank, copy in enumerate(copies) if copy is not None and copy.refused)
    if refused:
        if may_refuse and len(refused) == len(ranks):
            return None
        first = copies[refused[0]]
        some = " on some ranks only" if len(refused) < len(ranks) else ""
        return _finding(case, at, refused, f"was refused{some}: {first.refused if first else ''}")
    # Results of the micro-batch after the copy, and the states that follow it; here they are the copy's own.
    after = [point for point in expectation.points if point.index > at]
    due = [replace(next(p for p in after if p.snapshot is kind), index=at) for kind in (False, True)]
    reports = []
    for rank, twin in enumerate(copies):
        if twin is not None:
            states = tuple(state for state in (twin.snapshot, twin.stepped) if state is not None)
            reports.append(RankObservation(rank, (OperationResult(at, dict(twin.results)),), states))
    if any(copy is not None and copy.stepped is not None for copy in copies):
        due.append(after[-1])
    comparison = Comparison(gradients=all(copy is None or copy.gradients for copy in copies), optimizer=False)
    return agreement.review(case, replace(expectation, points=tuple(due)), reports, comparison, "the deep copy")[0]


def _copied_at(case: Case) -> int | None:
    """Return where the model is copied and the copy trained; None where a case has no copy, or no micro-batch after it."""
    labels = [getattr(operation, "label", "") for operation in case.program]
    at = next((index for index, label in enumerate(labels) if label in (COPY, COPY_IN_NO_SYNC)), None)
    return None if at is None or _batch_after(case, at) is None else at


def _batch_after(case: Case, index: int) -> Batch | None:
    return next((batch for operation in case.program[index:] for batch in operation.batches()), None)


def _finding(case: Case, index: int, ranks: tuple[int, ...], sentence: str) -> Finding:
    statement = f"the deep copy {sentence}, on {ranks_text(ranks)}"
    explanation = f"after operation {index}: {statement}"
    return finding(case, FailureKind.DIVERGED, "deep copy", index, statement, explanation, ranks=ranks)


# ------------------------------------------------------------------------------------------------- deep copies

COPY, COPY_IN_NO_SYNC = "deepcopy", "deepcopy in no_sync"
"""Labels of the observations at which the model is copied; the copy runs outside of `no_sync` both times."""


class CopyingProgram(RankProgram):
    """A program that copies its model at a marked point and trains the copy before it goes on."""

    copied: Copied | None = None
    may_refuse = True
    """Whether the copy may be refused; if not, what it raises counts."""

    def run(self, *, observe_all: bool = False) -> RankObservation:
        """Report the copy too."""
        return super().run(observe_all=observe_all).extended(CopyingObservation, copied=self.copied)

    def observe(self, label: str) -> None:
        """Take a snapshot, after the copy has done the next micro-batch and one step."""
        if label in (COPY, COPY_IN_NO_SYNC) and (batch := _batch_after(self.case, self.index)) is not None:
            self.copied = self._copy(label, batch)
        super().observe(label)

    def _copy(self, label: str, batch: Batch) -> Copied:
        twin, refused = nn.Module(), ""
        try:
            with self.adapter.no_sync(self.model) if label == COPY_IN_NO_SYNC else nullcontext():
                twin = copy.deepcopy(self.model)
        except Exception as refusal:  # any exception counts as a refusal
            if not self.may_refuse:
                raise
            refused = f"{type(refusal).__name__}: {refusal}"
        # Tell all ranks: if some refuse, the others would wait for them in the copy's first collective.
        told: list[str] = [""] * self.case.world.size
        dist.all_gather_object(told, refused)
        if any(told):
            return Copied(refused)
        inputs = models.make_inputs(self.case, batch, self.rank)
        forwarded = models.forward(twin, self.case, batch, self.rank, inputs)
        forwarded.loss.backward()
        snapshot, stepped = snapshot_of(self.adapter, twin, None, self.index, label), None
        parameters = [p for _, p in self.adapter.named_parameters(twin) if p.grad is not None]
        if any(isinstance(operation, Step) for operation in self.case.program[self.index :]):
            optimizers.build_optimizer(self.case, parameters).step() if parameters else None
            stepped = snapshot_of(self.adapter, twin, None, len(self.case.program), label)
        # A large step of the copy: the original must not notice.
        torch.optim.SGD(parameters, lr=1.0).step() if parameters else None
        return Copied("", forwarded.values(), snapshot, stepped, self.adapter.observes_gradients)


MAY_REFUSE = RunMode(rank_jobs.run_as, (CopyingProgram, {}), review=review_copies)
MUST_COPY = RunMode(rank_jobs.run_as, (CopyingProgram, {"may_refuse": False}), review=review_copies)

# ------------------------------------------------------------------------------------------- parts of a model

PART, _FACTOR = "layers.0", 0.5
MODULE, PARAMETERS, ALONE = "module replaced", "parameters replaced", "called alone"
"""Labels of the observations before which something happens to the part."""


class PartsProgram(RankProgram):
    """A program that replaces a part of its model, or calls it alone, before a marked point is observed."""

    def observe(self, label: str) -> None:
        """Do what the label says, then take a snapshot."""
        if label in (MODULE, PARAMETERS):
            other = self.plain_part(PART) if label == MODULE else None
            user_code.scale(other.parameters() if other is not None else (), _FACTOR)
            user_code.substitute(self.model, PART, other, _FACTOR)
        if label == ALONE:
            weight = self.plain_part(PART).get_parameter("weight")
            with torch.no_grad():
                user_code.part(self.model, PART)(torch.ones_like(weight)[:2])
        super().observe(label)


class ReplacingReplay(Replay):
    """The replacement of a part has the part's numbers times a factor."""

    def _observed(self, index: int, *, pending: bool) -> ReplayPoint:
        label = getattr(self.case.program[index], "label", "") if index < len(self.case.program) else ""
        if label in (MODULE, PARAMETERS):
            self.scale((f"{PART}.*",), _FACTOR)
        return super()._observed(index, pending=pending)


PARTS = RunMode(rank_jobs.run_as, (PartsProgram, {}))
PARTS_REPLACED = RunMode(rank_jobs.run_as, (PartsProgram, {}), rank_jobs.expect_as, (ReplacingReplay, {}))

# ------------------------------------------------------------------------------- activations that wait elsewhere


class OffloadedActivations(RankProgram):
    """A program in which a copy takes the place of each tensor that autograd saves, as offloading of activations does."""

    def call(self, batch: Any, **kinds: Any) -> models.Forwarded:
        """Run the model."""
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda copied: copied):
            return super().call(batch, **kinds)


OFFLOADED_ACTIVATIONS = RunMode(rank_jobs.run_as, (OffloadedActivations, {}))


class InEvaluation(RankProgram):
    """A program whose model is in evaluation throughout, as those train who fine-tune without dropout."""

    def _model_of(self, case: Case, flags: Mapping[str, bool]) -> nn.Module:
        return super()._model_of(case, flags).eval()


IN_EVALUATION = RunMode(rank_jobs.run_as, (InEvaluation, {}))

# ------------------------------------------------------------------------------- an optimizer of some parameters


class PartlyOptimized(RankProgram):
    """A program whose optimizer has the first parameters only."""

    def build_optimizer(self) -> None:
        self.optimizer = self.adapter.build_optimizer(self.model, partial(_over_the_first, self.case))


class PartlyReplayed(Replay):
    """The oracle's run of it."""

    def build_optimizer(self) -> None:
        self.optimizer = _over_the_first(self.case, self.parameters.values())


def _over_the_first(case: Case, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return optimizers.build_optimizer(case, list(parameters)[:2])


PARTLY_OPTIMIZED = RunMode(rank_jobs.run_as, (PartlyOptimized, {}), rank_jobs.expect_as, (PartlyReplayed, {}))

# ------------------------------------------------------------------------------------------ one replica by itself


class FirstReplicaEvaluates(RankProgram):
    """Before the program the ranks of the first replica run a forward that the others do not run."""

    def run_operations(self, *, observe_all: bool = False) -> None:
        if self.rank < self.case.world.mesh_shape[-1] * self.case.world.tensor_parallel:
            with torch.no_grad():
                self.call(Batch(9))
        super().run_operations(observe_all=observe_all)


AFTER_ONE_REPLICA = RunMode(rank_jobs.run_as, (FirstReplicaEvaluates, {}), besides="the evaluation by one replica")

# -------------------------------------------------------------------------------------- gradients that are scaled


class ScaledReplay(Replay):
    """A replay whose reduction gives a multiple of the mean."""

    factor = 1.0

    def _add_mean(self, fqn: str, parameter: nn.Parameter, reduced: Reduced, summed: torch.dtype) -> None:
        super()._add_mean(fqn, parameter, replace(reduced, mean=reduced.mean * self.factor), summed)


def scaled(factor: float, **how: Any) -> RunMode:
    """Return a mode in which gradients are `factor` times the mean; `how` are the other fields of the mode."""
    return RunMode(expect=rank_jobs.expect_as, expect_arguments=(ScaledReplay, {"factor": factor}), **how)


# --------------------------------------------------------------------------------- gradients that are not finite


@dataclass(frozen=True, slots=True)
class Remark:
    """A fault that a rank noticed itself, because the numbers of the case do not show it.

    Attributes:
        operation: The operation in or after which it happened.
        quantity: The wrong quantity, in two or three words.
        statement: The fault.
        error: The error, if a number is wrong.
        bound: The largest allowed error.
        derivation: The derivation of the bound.
    """

    operation: int
    quantity: str
    statement: str
    error: float | None = None
    bound: float | None = None
    derivation: str = ""


@dataclass(frozen=True, slots=True)
class RemarkedObservation(RankObservation):
    """The report of a rank with its own remarks."""

    remarks: tuple[Remark, ...] = ()


def review_remarks(case: Case, ranks: Sequence[RankObservation], _expectation: Expectation) -> Finding | None:
    """Return the earliest remark of any rank as a finding."""
    remarks = [(remark.operation, rank.rank, remark) for rank in ranks for remark in getattr(rank, "remarks", ())]
    if not remarks:
        return None
    _, rank, remark = min(remarks, key=lambda entry: entry[:2])
    return finding(
        case,
        FailureKind.DIVERGED,
        remark.quantity,
        remark.operation,
        f"{remark.statement}, on rank {rank}",
        ranks=(rank,),
        max_error=remark.error,
        bound=remark.bound,
        bound_derivation=remark.derivation,
    )


_NORMS = (2.0, 1.0, math.inf)


class PoisonedProgram(RankProgram):
    """A program that ends with one non-finite gradient, clipped by each norm; reports differences from one process."""

    value = math.inf
    raises = False
    """Whether `error_if_nonfinite` is set."""

    def run(self, *, observe_all: bool = False) -> RankObservation:
        """Run the case, then clip; remarks come last. Collectives: those of the norm, too."""
        observation = super().run(observe_all=observe_all)
        if observation.error is not None:
            return observation
        noted: list[Remark] = []
        pieces = [piece for held in self.adapter.local_pieces(self.model).values() for piece in held]
        # Views of this rank's gradients, each with whether it has the parameter's first element.
        grads = [(piece.start == 0 < piece.stop, piece.grad) for piece in pieces if piece.grad is not None]
        before = [grad.clone() for _, grad in grads]
        for norm_type in _NORMS:
            for (_, grad), kept in zip(grads, before):
                grad.copy_(kept)
            for starts, grad in grads[:1]:
                grad.view(-1)[:1].fill_(self.value) if starts else None
            local = [grad for _, grad in grads]
            wrong = self._wrong_error(norm_type, local, before) if self.raises else self._wrong_norm(norm_type, local)
            try:
                texts = list(wrong)
            except Exception as raised:  # noqa: BLE001 - whatever a foreign implementation raises is a finding
                return replace(observation, error=self.record(raised))
            noted += [Remark(len(self.case.program), "clipping", f"by the {norm_type}-norm: {text}") for text in texts]
        return observation.extended(RemarkedObservation, remarks=tuple(noted))

    def _wrong_norm(self, norm_type: float, grads: list[torch.Tensor]) -> Iterator[str]:
        norm, value = float(self.adapter.clip_grad_norm(self.model, 0.1, norm_type)), self.value
        if not (norm == value or (math.isnan(norm) and math.isnan(value))):
            yield f"a gradient is {value}, and the norm is {norm}"
        # One process multiplies every gradient by 0.1 / (norm + 1e-6): by zero, or by NaN.
        finite = sum(int(((grad != 0) & grad.isfinite()).sum()) for grad in grads)
        if finite:
            yield f"a gradient is {value}, and {finite} elements are still finite and not zero, expected none"

    def _wrong_error(self, norm_type: float, grads: list[torch.Tensor], before: list[torch.Tensor]) -> Iterator[str]:
        clip: Any = self.adapter.clip_grad_norm
        try:
            norm = clip(self.model, 0.1, norm_type, error_if_nonfinite=True)
        except RuntimeError:
            changed = sum(int((grad.isfinite() & (grad != kept)).sum()) for grad, kept in zip(grads, before))
            if changed:
                yield f"an error was raised after {changed} elements had been scaled"
        else:
            yield f"no error was raised, and the norm is {float(norm)}"


def poisoned(value: float, *, raises: bool) -> RunMode:
    """Return a mode in which one gradient becomes `value`, with or without `error_if_nonfinite`."""
    return RunMode(rank_jobs.run_as, (PoisonedProgram, {"value": value, "raises": raises}), review=review_remarks)
