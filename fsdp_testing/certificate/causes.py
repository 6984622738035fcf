"""Why do cells fail? Each is followed to the simplest cell that fails alike; those few are looked at closely."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace

from fsdp_testing.campaign.investigation import Investigated, Investigator
from fsdp_testing.campaign.lane import CaseResult
from fsdp_testing.certificate.axes import Cell
from fsdp_testing.certificate.cases import case_of
from fsdp_testing.certificate.certify import Certificate
from fsdp_testing.certificate.cube import simpler
from fsdp_testing.certificate.verdicts import FAILS, Mark
from fsdp_testing.findings.known import KnownFailures
from fsdp_testing.judging.batch_judge import CaseNote
from fsdp_testing.records import RAISES, Case, FailureKind
from fsdp_testing.strategies import legal_case, needs_of_case

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
        link: Where that is told.
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
        return tuple(o.text(place).removeprefix("operation ") for place, o in enumerate(self.case.program))


class CauseFinder:
    """Finds the causes of the cells that fail.

    Args:
        certificate: What ran.
        known: Known failures of the implementation.
        seconds: Time for it all; what is not reached is told as its simplest cell.
    """

    def __init__(self, certificate: Certificate, known: KnownFailures, seconds: float) -> None:
        self._certificate = certificate
        self._verdicts = certificate.verdicts
        self._known = known
        self._until = time.monotonic() + seconds
        self._lane = certificate.lane()
        self._besides: dict[Cell, Mark | None] = {}
        self._simplest: dict[Cell, Cell] = {}

    def find(self) -> list[CellCause]:
        """Return the causes, the one of most cells first."""
        led: dict[Cell, int] = {}
        for cell in self._verdicts.failing():
            end = self._follow(cell)
            led[end] = led.get(end, 0) + 1
        found: dict[Hashable, CellCause] = {}
        for cell, count in sorted(led.items(), key=lambda item: (len(item[0].schedule), item[0].size, item[0])):
            key, cause = self._looked_at(cell, count)
            before = found.get(key)
            found[key] = cause if before is None else replace(before, cells=before.cells + count)
        return sorted(found.values(), key=lambda cause: -cause.cells)

    def _follow(self, cell: Cell) -> Cell:
        path = [cell]
        while path[-1] not in self._simplest:
            after = next(self._alike(path[-1]), None)
            if after is None:
                self._simplest[path[-1]] = path[-1]
            else:
                path.append(after)
        end = self._simplest[path[-1]]
        self._simplest |= dict.fromkeys(path, end)
        return end

    def _alike(self, cell: Cell) -> Iterator[Cell]:
        """Yield the cells that are simpler in one way and fail alike; those that were not asked run now."""
        mark = self._mark(cell)
        nearer = [one for one in simpler(cell) if self._certificate.runner.claimed(one)]
        asked = [one for one in nearer if one not in self._verdicts.ran and one not in self._besides]
        for size in sorted({one.size for one in asked}):
            if time.monotonic() < self._until:
                job = tuple(one for one in asked if one.size == size)
                self._besides |= dict(self._certificate.runner.run(self._lane, job))
        yield from (one for one in nearer if _are_alike(mark, self._mark(one)))

    def _mark(self, cell: Cell) -> Mark | None:
        return self._verdicts.marks.get(cell) or self._besides.get(cell)

    def _looked_at(self, cell: Cell, count: int) -> tuple[Hashable, CellCause]:
        mark = self._mark(cell)
        assert mark is not None
        assert mark.signature is not None
        capabilities = self._certificate.plan.implementation.capabilities
        plain = CellCause(cell, count, str(mark.signature), mark.reason, case_of(cell, capabilities))
        left = self._until - time.monotonic()
        if left <= 0:
            return cell, plain
        investigator = Investigator(
            self._certificate.plan.implementation.reference,
            lambda case: legal_case(case, capabilities),
            lambda case: needs_of_case(case) <= capabilities,
            min(left, _SHRINK_SECONDS),
        )
        suspect = CaseResult(plain.case, CaseNote(0, "suspect", mark.reason, signature=mark.signature))
        return _told(plain, investigator.investigate(self._lane, suspect, self._known))


def _told(plain: CellCause, found: Investigated | None) -> tuple[Hashable, CellCause]:
    """Return what makes a cause one, and the cause as it is told after a closer look."""
    if found is None:
        return plain.cell, plain
    if found.discovery is not None:
        one = found.discovery
        plain = replace(plain, signature=str(one.signature), reason=one.reason, case=one.case, shortened=one.confirmed)
    if found.known is not None:
        return found.known.name, replace(plain, known=found.known.name, link=found.known.link)
    return (found.discovery.key if found.discovery is not None else plain.cell), plain


def _are_alike(one: Mark | None, other: Mark | None) -> bool:
    if one is None or other is None or one.status != FAILS or other.status != FAILS:
        return False
    a, b = one.signature, other.signature
    assert a is not None
    assert b is not None
    if a.kind in RAISES:
        return (a.kind, a.quantity) == (b.kind, b.quantity)
    return a.kind == b.kind or {a.kind, b.kind} <= _NUMBERS
