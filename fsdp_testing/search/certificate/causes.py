"""Why do cells fail? Each is followed to the simplest cell that fails alike; those few are looked at closely."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace

from fsdp_testing.cases.drawing import legal_case, needs_of_case
from fsdp_testing.cases.records import RAISES, Case, FailureKind, Mismatch, Operation
from fsdp_testing.checks.findings.known import KnownFailures
from fsdp_testing.judging.batch_judge import CaseNote
from fsdp_testing.search.campaign.investigation import Investigated, Investigator
from fsdp_testing.search.campaign.lane import CaseResult, Lane, drive
from fsdp_testing.search.certificate.axes import Cell
from fsdp_testing.search.certificate.cases import case_of
from fsdp_testing.search.certificate.certify import Certificate, Marked
from fsdp_testing.search.certificate.cube import packed, simpler
from fsdp_testing.search.certificate.verdicts import FAILS, Mark

_NUMBERS = frozenset({FailureKind.DIVERGED, FailureKind.DISAGREED, FailureKind.MISSING})
_SHRINK_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class CellCause:
    """One cause, as far as is known.

    Attributes:
        cell: The simplest cell that shows it.
        cells: How many of the cells that ran lead to it.
        signature: What it looks like there.
        reason: The first fact that differs.
        case: The shortest case that shows it; if nobody had the time to shorten it, that of the cell.
        shortened: Whether it was shortened.
        known: Name of the known failure that it is; empty if it is none.
        link: Where that is reported.
    """

    cell: Cell
    cells: int
    signature: str
    reason: str
    case: Case
    shortened: bool = False
    known: str = ""
    link: str = ""

    @property
    def schedule(self) -> tuple[str, ...]:
        """Return the operations of its case, one line each."""
        return schedule_of(self.case)


def schedule_of(case: Case) -> tuple[str, ...]:
    """Return the operations of a case, one line each, with the ranks that leave out a part of the model."""
    return tuple(
        operation.text(place).removeprefix("operation ") + _left_out(operation, case.world.size)
        for place, operation in enumerate(case.program)
    )


def _left_out(operation: Operation, size: int) -> str:
    usage = [[batch.usage_of(rank) or () for batch in operation.batches()] for rank in range(size)]
    ranks = [rank for rank, batches in enumerate(usage) if not all(map(all, batches))]
    if not ranks:
        return ""
    return ", a part left out" + ("" if len(ranks) == size else f" on rank {', '.join(map(str, ranks))}")


class CauseFinder:
    """Finds the causes of the cells that fail.

    Args:
        certificate: What ran.
        known: Known failures of the implementation.
        seconds: Time for it all; what is not reached is reported as its simplest cell.
    """

    def __init__(self, certificate: Certificate, known: KnownFailures, seconds: float) -> None:
        self._certificate = certificate
        self._verdicts = certificate.verdicts
        self._known = known
        self._until = time.monotonic() + seconds
        self._lanes = [certificate.lane() for _ in range(certificate.plan.lanes)]
        self._besides: dict[Cell, Mark] = {}
        self._simpler: dict[Cell, Cell] = {}
        self.unexplained = 0

    def find(self) -> list[CellCause]:
        """Return the causes, the one of most cells first. `unexplained` has the cells for which there was no time."""
        failing = self._verdicts.failing()
        self._follow(failing)
        led: dict[Cell, int] = {}
        for cell in failing:
            end = cell
            while self._simpler.get(end, end) != end:
                end = self._simpler[end]
            if end in self._simpler:
                led[end] = led.get(end, 0) + 1
            else:
                self.unexplained += 1
        found: dict[Hashable, CellCause] = {}
        for cell, count in sorted(led.items(), key=lambda item: _simplicity(item[0])):
            key, cause = self._looked_at(cell, count)
            before = found.get(key)
            found[key] = cause if before is None else replace(before, cells=before.cells + count)
        return sorted(found.values(), key=lambda cause: -cause.cells)

    def _follow(self, failing: list[Cell]) -> None:
        """Find for every cell the first simpler one that fails alike, and for that one likewise; itself if there is none.

        All cells take a step at a time: what they ask for next runs together.
        """
        candidates: dict[Cell, Iterator[Cell]] = {}
        waits_for: dict[Cell, Cell] = {}
        todo = failing
        while todo and time.monotonic() < self._until:
            ready = list(todo)
            todo = []
            while ready:
                cell = ready.pop()
                if cell in self._simpler:
                    continue
                nearer = candidates.setdefault(cell, filter(self._certificate.runner.claimed, simpler(cell)))
                asked = waits_for.pop(cell, None) or next(nearer, cell)
                if asked != cell and not self._is_known(asked):
                    waits_for[cell] = asked
                    todo.append(cell)
                elif asked == cell or _are_alike(self._mark(cell), self._mark(asked)):
                    self._simpler[cell] = asked
                    ready.append(asked)
                else:
                    ready.append(cell)
            self._run(set(waits_for.values()))

    def _is_known(self, cell: Cell) -> bool:
        return cell in self._verdicts.ran or cell in self._besides

    def _run(self, cells: Iterable[Cell]) -> None:
        """Run cells beside those of the certificate; none is begun when the time is up."""
        certificate = self._certificate
        batches = packed([[cell] for cell in sorted(cells)])

        def next_job() -> Callable[[Lane], Marked] | None:
            job = next(batches, None) if time.monotonic() < self._until else None
            return None if job is None else lambda lane: certificate.runner.run(lane, job)

        def take(found: Marked) -> None:
            self._besides.update(found)

        drive(certificate.pool, self._lanes, next_job, take)

    def _mark(self, cell: Cell) -> Mark | None:
        return self._verdicts.marks.get(cell) or self._besides.get(cell)

    def _looked_at(self, cell: Cell, count: int) -> tuple[Hashable, CellCause]:
        mark = self._mark(cell)
        assert mark is not None
        assert mark.signature is not None
        capabilities = self._certificate.plan.implementation.capabilities
        plain = CellCause(cell, count, str(mark.signature), mark.reason, case_of(cell, capabilities))
        rule = self._known.recognize(mark.signature, plain.case)
        left = self._until - time.monotonic()
        if rule is not None or left <= 0:
            return _told(plain, Investigated(mark.signature, known=rule))
        investigator = Investigator(
            self._certificate.plan.implementation.reference,
            lambda case: legal_case(case, capabilities),
            lambda case: needs_of_case(case) <= capabilities,
            min(left, _SHRINK_SECONDS),
        )
        suspect = CaseResult(plain.case, CaseNote(0, "suspect", mark.reason, signature=mark.signature))
        return _told(plain, investigator.investigate(self._lanes[0], suspect, self._known))


def _told(plain: CellCause, found: Investigated | None) -> tuple[Hashable, CellCause]:
    """Return what makes a cause one, and the cause as it is reported after a closer look."""
    if found is None:
        return plain.cell, plain
    if found.discovery is not None:
        one = found.discovery
        plain = replace(plain, signature=str(one.signature), reason=one.reason, case=one.case, shortened=one.confirmed)
    key: Hashable = found.discovery.key if found.discovery is not None else plain.cell
    if found.known is not None:
        key, plain = found.known.name, replace(plain, known=found.known.name, link=found.known.places)
    return key, plain


def _simplicity(cell: Cell) -> tuple[object, ...]:
    return (len(cell.schedule), cell.size, cell)


def _are_alike(one: Mark | None, other: Mark | None) -> bool:
    if one is None or other is None or one.status != FAILS or other.status != FAILS:
        return False
    a, b = one.signature, other.signature
    assert a is not None
    assert b is not None
    if a.kind in RAISES:
        return (a.kind, a.quantity) == (b.kind, b.quantity)
    if a.quantity != b.quantity and Mismatch.DTYPE.value in f"{a.quantity} {b.quantity}":
        return False  # a wrong gradient is a wrong output elsewhere, and a wrong dtype nothing else
    return a.kind == b.kind or {a.kind, b.kind} <= _NUMBERS
