"""Finds what one process would have to do to give the wrong numbers of a failure.

The oracle runs the program again with one operation left out, or with another setting. If its result equals the
implementation's numbers within the bound, that is the hypothesis: for example, a step had no effect on the weights in use.
Other hypotheses: some units kept their weights over a step, or ranks began with their own values. A wrong gradient is
decomposed into its terms (`contributions`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from fsdp_testing.cases.models.tree import unit_of
from fsdp_testing.cases.operations.optimizing import EditGradients, IdleStep
from fsdp_testing.cases.records import (
    UNIT_ROUNDOFF,
    Case,
    FailureKind,
    Freeze,
    Mismatch,
    Observe,
    Operation,
    RankObservation,
)
from fsdp_testing.errors import HarnessError
from fsdp_testing.explain.compared_pieces import ComparedPiece, compared_pieces
from fsdp_testing.explain.contributions import Contributions, contributions
from fsdp_testing.explain.norms import Norm, norm_of_what
from fsdp_testing.explain.patterns import Pattern, pattern_of
from fsdp_testing.judging.checkers import agreement
from fsdp_testing.judging.checkers.divergence import DECISIVE
from fsdp_testing.judging.checkers.explain import listed
from fsdp_testing.oracle.gradient_terms import GradientTerm
from fsdp_testing.oracle.quantities import Comparison, Expectation, Expected, ExpectedPoint
from fsdp_testing.oracle.tensors import largest

Oracle = Callable[[Case], Expectation]
"""Runs a case in one process, freely, with a snapshot after every operation."""

UnshardedUnits = Callable[[int], Mapping[str, Sequence[str]]]
"""Units that are gathered when an operation begins, with the names of their parameters."""

GRADIENT_IS_NONE = "unused_gradient_is_none"
_PRESUMED = {("zero_grad", "set_to_none"): frozenset({GRADIENT_IS_NONE})}
"""Claims that a sentence about another setting presumes, besides those that the operation needs."""

_SUMS = (Mismatch.NUMBERS, Mismatch.NONE, Mismatch.NOT_NONE)
"""Kinds of divergence of a gradient with wrong terms; a None gradient has no terms."""


@dataclass(frozen=True, slots=True)
class Sources:
    """The sources of one-process results.

    Attributes:
        oracle: Runs a case.
        terms: What each backward added to gradients up to an operation.
        starts: What each rank's model begins with, by name; given whether it is the new one of an operation that renews it.
        besides: What the check does besides the program, in words, and the oracle of the program alone; None if nothing.
        claimed: The implementation's claims; no cause is named that presumes more. None if unknown.
    """

    oracle: Oracle
    terms: Callable[[Case, int], Sequence[GradientTerm]]
    starts: Callable[[Case, bool], Sequence[Mapping[str, torch.Tensor]]] = lambda _case, _new: ()
    besides: tuple[str, Oracle] | None = None
    claimed: frozenset[str] | None = None

    def claims(self, *tags: str) -> bool:
        """Whether all of these are claimed, as far as is known."""
        return self.claimed is None or self.claimed.issuperset(tags)


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A hypothesis: what the wrong numbers are equal to.

    Attributes:
        left_out: Index of the operation without which one process gives the same; -1 for another hypothesis.
        kinds: Kinds of the quantities that agree (`result`, `state` for a saved one, `gradient`, `value`, ...).
        units: The only units for which the step `left_out` had no effect; empty if for all.
        contributions: The terms of wrong gradients.
        pattern: The pattern of the wrong numbers, element by element.
        ranks: The only affected ranks; empty for all.
        happened: What was done instead, as a clause.
        confirmed: The confirmation: how a sentence about the wrong quantity continues, "is ...".
    """

    left_out: int
    kinds: frozenset[str]
    units: tuple[str, ...] = ()
    contributions: Contributions | None = None
    pattern: Pattern | None = None
    ranks: tuple[int, ...] = ()
    happened: str = ""
    confirmed: str = "equals one process's result with that"

    @property
    def shape(self) -> tuple[object, ...]:
        """A key that is equal for one defect on schedules of one shape."""
        likeness = self.contributions and self.contributions.shape, self.pattern and self.pattern.kind
        return self.left_out, self.kinds, self.happened, *likeness


_KINDS = {
    "gradient": "gradients",
    "value": "parameters",
    "buffer": "buffers",
    "optimizer": "the optimizer's state",
    "result": "results",
    "state": "the saved state",
}


def kinds_text(kinds: Iterable[str]) -> str:
    """Return sorts of quantities in words."""
    return listed(sorted(_KINDS[kind] for kind in kinds))


def contradict(like: Hypothesis | None, rival: Hypothesis | None) -> bool:
    """Return whether both are known and cannot be the same defect, on schedules of the same shape."""
    if like is None or rival is None:
        return False
    return like.shape != rival.shape


class WrongNumbers:
    """The numbers of the first divergence of a case, and what they are compared with.

    Args:
        case: A case that diverges.
        ranks: The ranks' reports, with a snapshot after every operation.
        comparison: How the check compares.
        sources: What one process can be asked.
    """

    def __init__(self, case: Case, ranks: Sequence[RankObservation], comparison: Comparison, sources: Sources) -> None:
        self._case = case
        self._ranks = ranks
        self._comparison = comparison
        self._sources = sources
        truth = sources.oracle(case)
        self._shapes = truth.shapes
        self._points = truth.points
        self._divergences = agreement.compare(truth, ranks, comparison).divergences
        wanted = dict.fromkeys(divergence.quantity for divergence in self._divergences)
        wanted = {q if q.kind != "optimizer" else q._replace(rank=-1): None for q in wanted}
        self._index = self._divergences[0].index if wanted else -1
        places = (p for p in truth.points if p.index == self._index and set(wanted) <= set(p.quantities))
        self._point = next(places, None) if wanted else None
        self._pieces = [] if self._point is None else compared_pieces(ranks, self._point, wanted)
        self._wrong = [piece for piece in self._pieces if piece.wrong]
        self._kinds = frozenset("state" if q.name.startswith("state.") else q.kind for q in wanted)

    def hypothesis(self, unsharded: UnshardedUnits) -> Hypothesis | None:
        """Return what the numbers are equal to, or None if no hypothesis fits.

        In lockstep no operation is left out: each begins with the implementation's state.
        """
        point, free = self._point, not self._comparison.lockstep
        wrong = {piece.quantity for piece in self._wrong}
        if point is None or not self._wrong or {piece.quantity for piece in self._pieces} != wrong:
            return None  # not only numbers differ
        cause = self._besides(point)
        if cause is None and free:
            cause = self._lost_edit(point)
        cause = cause or self._contributions(point) or self._begun()
        if cause is None and free:
            cause = self._other_program(point) or self._stale_units(point, unsharded)
        return cause or self._needless(point) or (self._norm(point) if free else None) or self._pattern(point)

    # ------------------------------------------------------------------------------------------- gradients

    def _contributions(self, point: ExpectedPoint) -> Hypothesis | None:
        if any(
            divergence.quantity.kind != "gradient" or divergence.mismatch not in _SUMS
            for divergence in self._divergences
        ):
            return None
        names = {divergence.quantity for divergence in self._divergences if divergence.kind is not FailureKind.MISSING}
        bound = max(largest(torch.as_tensor(expected.bound)) for expected in point.quantities.values())
        due = {
            quantity.name: Expected(torch.zeros(self._shapes[quantity.name]), bound)
            if expected.value is None
            else expected
            for quantity, expected in point.quantities.items()
            if quantity in names
        }
        terms = self._sources.terms(self._case, self._index) if due else ()
        sums = contributions(self._index, due, self._ranks, terms, self._unit_roundoff()) if due else None
        return None if sums is None else Hypothesis(-1, self._kinds, contributions=sums)

    def _needless(self, point: ExpectedPoint) -> Hypothesis | None:
        """Gradients where one process has none: of frozen or unused parameters, or of no backward at all."""
        if any(
            piece.quantity.kind != "gradient" or piece.due is not None or piece.got is None for piece in self._wrong
        ):
            return None
        names = {piece.quantity.name for piece in self._wrong}
        zeros = " of zeros" if not any(bool(piece.got.any()) for piece in self._wrong if piece.got is not None) else ""
        if zeros and (self._comparison.none_is_zero or not self._sources.claims(GRADIENT_IS_NONE)):
            return None  # zeros and None are equivalent here, and explain nothing
        operation = self._case.program[point.index] if point.index < len(self._case.program) else None
        if operation is not None and not operation.runs_backward:
            what = f"{_name(self._case, point.index)}, gives parameters gradients{zeros} that no backward computed"
        elif not any(point.requires_grad.get(name, True) for name in names):
            what = f"frozen parameters get gradients{zeros}"
        elif any(names & set(term.uses) for term in self._sources.terms(self._case, self._index)):
            return None
        else:
            what = f"parameters that no rank used get gradients{zeros}"
        return self._done(what)

    def _unit_roundoff(self) -> float:
        """That of the narrowest dtype of a reduction; 0 where bounds allow for any order of the same sum."""
        if not self._comparison.lockstep:
            return 0.0
        precision, stored = self._case.mixed_precision, self._case.model.dtype
        wire = stored if precision is None else precision.reduce_dtype or precision.param_dtype or stored
        return max(UNIT_ROUNDOFF[stored], UNIT_ROUNDOFF[wire])

    # ------------------------------------------------------------------------------------------- other programs

    def _lost_edit(self, point: ExpectedPoint) -> Hypothesis | None:
        """Whether gradients that were halved are as before: of two ranks, they look like a sum in place of a mean."""
        edit = self._case.program[point.index] if point.index < len(self._case.program) else None
        if not isinstance(edit, EditGradients) or edit.edit in ("zeros", "none") or not point.snapshot:
            return None
        if not self._is_like(self._replaced(point.index, Observe()), point):
            return None
        return Hypothesis(point.index, self._kinds, ranks=self._affected())

    def _other_program(self, point: ExpectedPoint) -> Hypothesis | None:
        """Whether one process gives the same without an operation (it only observes then), or with another setting of one.

        The last operations first: what those before them left was right when it was observed.
        """
        for index in range(min(self._index, len(self._case.program) - 1), -1, -1):
            operation, name = self._case.program[index], _name(self._case, index)
            # An operation that was left out gives no result.
            left_out = index != point.index or point.snapshot
            if left_out and self._is_like(self._replaced(index, Observe()), point):
                # State that was right after that operation has lost its effect since.
                lost = index < point.index and point.snapshot
                what = f"what {name}, did to {kinds_text(self._kinds)} is lost" if lost else ""
                return Hypothesis(index, self._kinds, ranks=self._affected(), happened=what)
            for setting, variant in operation.other_settings():
                presumed = (
                    operation.required() | variant.required() | _PRESUMED.get((operation.kind, setting), frozenset())
                )
                if self._sources.claims(*presumed) and self._is_like(self._replaced(index, variant), point):
                    done, due = (repr(getattr(done_or_due, setting)) for done_or_due in (variant, operation))
                    return self._done(f"{name}, works as if {setting}={done} were asked for, not {due}")
            if operation.saves_optimizer and self._is_like(
                self._replaced(index, IdleStep(), operation), point, later=1
            ):
                return self._done(f"{name}, saves the optimizer's state as if a step on zeros had been made")
        return None

    def _replaced(self, index: int, *operations: Operation) -> Case:
        program = self._case.program
        return replace(self._case, program=(*program[:index], *operations, *program[index + 1 :]))

    def _stale_units(self, point: ExpectedPoint, unsharded: UnshardedUnits) -> Hypothesis | None:
        """Whether some units alone took no part in a step: those that were gathered when it was made.

        One process is made to do that by freezing their parameters before the gradients of this step come into being.
        """
        steps = [i for i, operation in enumerate(self._case.program[: self._index]) if operation.steps]
        for number, step in reversed(list(enumerate(steps))):
            units = unsharded(step)
            fqns = tuple(fqn for names in units.values() for fqn in names)
            if not fqns or self._kinds != {"result"}:
                continue
            begin = steps[number - 1] + 1 if number else 0
            program = (*self._case.program[:begin], Freeze(fqns), *self._case.program[begin:])
            if self._is_like(replace(self._case, program=program), point, later=1):
                return Hypothesis(step, self._kinds, tuple(units))
        return None

    def _besides(self, point: ExpectedPoint) -> Hypothesis | None:
        """Whether the check's extra action, besides the program, had no effect."""
        if self._sources.besides is None:
            return None
        what, oracle = self._sources.besides
        if not self._is_like(self._case, point, oracle=oracle):
            return None
        return self._done(f"{what} has no effect")

    def _is_like(self, variant: Case, point: ExpectedPoint, *, later: int = 0, oracle: Oracle | None = None) -> bool:
        """Whether another run of the oracle gives what is wrong here, at the same place."""
        with suppress(HarnessError):  # an oracle that cannot run it says nothing of it
            points = (oracle or self._sources.oracle)(variant).points
            places = [p for p in points if p.snapshot == point.snapshot and p.index == point.index + later]
            return bool(places) and all(
                _decided(piece, places[-1].quantities.get(piece.quantity)) for piece in self._wrong
            )
        return False

    # ------------------------------------------------------------------------------------------- other numbers

    def _begun(self) -> Hypothesis | None:
        """Whether these are values with which models begin: the rank's own, another rank's, or those of a new model."""
        if not self._kinds <= {"value", "buffer"} or sum(piece.span[1] - piece.span[0] for piece in self._wrong) < 2:
            return None
        program = self._case.program[: self._index + 1]
        renewed = max((i for i, operation in enumerate(program) if operation.renews_model), default=-1)
        starts = self._sources.starts(self._case, renewed >= 0)
        for rank in (None, *range(1, len(starts))) if starts else ():
            if all(self._began(piece, starts[piece.rank if rank is None else rank]) for piece in self._wrong):
                what = f"the initial values of rank {rank} are given to all ranks, instead of rank 0's values"
                if renewed >= 0:
                    what = (
                        f"{_name(self._case, renewed)}, does not load the wrong values: the new model's own values stay"
                    )
                elif rank is None:
                    what = "ranks keep their own initial values instead of rank 0's"
                return self._done(what)
        return None

    def _began(self, piece: ComparedPiece, start: Mapping[str, torch.Tensor]) -> bool:
        value = start.get(piece.quantity.name)
        return value is not None and piece.is_like(Expected(value))

    def _norm(self, point: ExpectedPoint) -> Hypothesis | None:
        """The gradients that a total norm is made of; the same on every rank where it is wrong."""
        if {piece.quantity.name for piece in self._wrong} != {"total_norm"}:
            return None
        before = next((p for p in self._points if p.snapshot and p.index == point.index - 1), None)
        norm_type = getattr(self._case.program[point.index], "norm_type", None)
        if norm_type is None or (before is not None and before.pending):
            return None
        names = [q for q in before.quantities if q.kind == "gradient"] if before is not None else []
        parts = compared_pieces(self._ranks, before, names) if before is not None else []
        gradients = {q.name: before.quantities[q].value for q in names} if before is not None else {}
        measured = {fqn: value for fqn, value in gradients.items() if value is not None and value.numel()}
        earlier = {
            p.index: float(expected.value)
            for p in self._points
            for q, expected in p.quantities.items()
            if q.name == "total_norm" and p.index < point.index and expected.value is not None
        }
        accounts = set()
        # A policy makes units that a case does not name.
        named = self._case.wrapping.units if self._case.wrapping.policy is None else None
        units = {} if named is None else {fqn: unit_of(fqn, named) for fqn in measured}
        lacking = {rank.rank for rank in self._ranks if self._lacks_elements(rank)}
        if len(lacking) == len(self._ranks) or lacking != {piece.rank for piece in self._wrong}:
            lacking = set()
        for piece in self._wrong:
            if piece.got is None or piece.due is None:
                return None
            mine = [part.got for part in parts if part.rank == piece.rank and part.got is not None]
            bound = float(torch.as_tensor(piece.bound).max())
            dtype = str(piece.due.dtype).removeprefix("torch.")
            norm = Norm(float(piece.got), float(piece.due), bound, norm_type, dtype)
            accounts.add(norm_of_what(norm, measured, mine, earlier, lacks_elements=piece.rank in lacking, units=units))
        if len(accounts) != 1 or not any(accounts):
            return None
        return Hypothesis(-1, self._kinds, pattern=Pattern("norm", accounts.pop()), ranks=self._affected())

    def _lacks_elements(self, rank: RankObservation) -> bool:
        """Whether a rank has no element of some parameter that others have elements of."""
        parameters = rank.snapshots[-1].parameters.values() if rank.snapshots else ()
        return any(math.prod(p.shape) and all(piece.stop <= piece.start for piece in p.pieces) for p in parameters)

    def _pattern(self, point: ExpectedPoint) -> Hypothesis | None:
        """The pattern of all wrong numbers, if they share one."""
        pattern = pattern_of(self._pieces, point.quantities)
        return None if pattern is None else Hypothesis(-1, self._kinds, pattern=pattern, ranks=self._affected())

    def _done(self, what: str) -> Hypothesis:
        return Hypothesis(-1, self._kinds, happened=what, ranks=self._affected())

    def _affected(self) -> tuple[int, ...]:
        """The ranks on which something is wrong, where others have the same quantities right; else empty."""
        wrong = {piece.rank for piece in self._wrong}
        return () if wrong == {piece.rank for piece in self._pieces} else tuple(sorted(wrong))


def _decided(piece: ComparedPiece, variant: Expected | None) -> bool:
    """Whether the numbers equal another run's, and its bound leaves no doubt."""
    if variant is None or not piece.is_like(variant):
        return False
    if variant.value is None or not variant.value.numel() or piece.got is None or not variant.value.is_floating_point():
        return True
    apart = (piece.got.double() - piece.part_of(variant.value).double()).abs()
    finite = variant.value[variant.value.isfinite()].abs()
    greatest = float(finite.max()) if finite.numel() else 0.0
    return float(apart.nan_to_num(0.0).max()) <= DECISIVE * greatest


def _name(case: Case, index: int) -> str:
    return f"operation {index}, {case.program[index].words()}"
