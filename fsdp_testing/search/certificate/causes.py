"""Why do cells fail? Known failures are named; of the others the simplest are investigated as a campaign's suspects are."""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass, replace

from fsdp_testing.cases.drawing import legal_case, needs_of_case
from fsdp_testing.cases.records import Case, Operation
from fsdp_testing.checks.findings.discovery import Discovery
from fsdp_testing.judging.known import KnownFailures, Rule
from fsdp_testing.judging.signature import Signature, as_pattern
from fsdp_testing.search.campaign.investigation import Investigator, Suspect
from fsdp_testing.search.certificate.axes import Cell
from fsdp_testing.search.certificate.cases import case_of
from fsdp_testing.search.certificate.certify import Certificate

_SHRINK_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class CellCause:
    """One cause, as far as is known.

    Attributes:
        cell: The simplest cell that shows it, of those that ran.
        cells: How many of the cells that ran fail by it.
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
    """Finds the causes of the cells that fail, as a campaign does: what is known is counted, what is new is looked at closer.

    Args:
        certificate: What ran.
        known: Known failures of the implementation.
        seconds: Time for it all; what is not reached is only counted.
    """

    def __init__(self, certificate: Certificate, known: KnownFailures, seconds: float) -> None:
        self._certificate = certificate
        self._known = known
        self._until = time.monotonic() + seconds
        self._looks: dict[Signature, set[str]] = {}
        self._causes: dict[Hashable, CellCause] = {}
        self._keys: dict[str, Hashable] = {}
        self.unexplained = 0

    def find(self) -> list[CellCause]:
        """Return the causes, the one of most cells first. `unexplained` has the cells for which there was no time."""
        certificate = self._certificate
        for cell in sorted(certificate.verdicts.failing(), key=_simplicity):
            mark = certificate.verdicts.marks[cell]
            assert mark.signature is not None
            case = case_of(cell, certificate.plan.implementation.capabilities)
            cause = CellCause(cell, 1, str(mark.signature), mark.reason, case)
            rule = self._known.recognize(mark.signature, case)
            rule = rule or self._known.fitting(self._looks.get(mark.signature, ()), case)
            late = time.monotonic() >= self._until
            if rule is not None and (late or rule.name in self._keys or not rule.asks_cause(mark.signature)):
                self._count(self._keys.get(rule.name, rule.name), _known_as(cause, rule))
            elif late:
                self.unexplained += 1
            else:
                self._look_closer(cause, mark.signature)
        return sorted(self._causes.values(), key=lambda cause: -cause.cells)

    def _look_closer(self, cause: CellCause, signature: Signature) -> None:
        capabilities = self._certificate.plan.implementation.capabilities
        investigator = Investigator(
            self._certificate.plan.implementation.reference,
            lambda case: legal_case(case, capabilities),
            lambda case: needs_of_case(case) <= capabilities,
            min(max(0.0, self._until - time.monotonic()), _SHRINK_SECONDS),
        )
        suspect = Suspect(cause.case, signature, cause.reason)
        investigated = investigator.investigate(self._certificate.runner.cases, suspect, self._known)
        discovery = investigated.discovery if investigated is not None else None
        known = investigated.known if investigated is not None else None
        key: Hashable = cause.cell
        if discovery is not None:
            key, shortened = _key(discovery), discovery.confirmed
            looks = str(discovery.signature)
            cause = replace(cause, signature=looks, reason=discovery.reason, case=discovery.case, shortened=shortened)
        if known is not None:
            # The rule of a cause that was found before leads to that cause; it has its record.
            key, cause = self._keys.setdefault(known.name, known.name), _known_as(cause, known)
            self._looks.setdefault(signature, set()).add(known.name)
        elif discovery is not None and discovery.confirmed:
            # Other cells that look so, or that have what this one needs, have its cause.
            rule = discovery.rule()
            self._known = self._known.with_rule(rule)
            self._looks.setdefault(signature, set()).add(rule.name)
            self._keys[rule.name] = key
        self._count(key, cause)

    def _count(self, key: Hashable, cause: CellCause) -> None:
        earlier = self._causes.get(key)
        self._causes[key] = cause if earlier is None else replace(earlier, cells=earlier.cells + cause.cells)


def _known_as(cause: CellCause, rule: Rule) -> CellCause:
    return replace(cause, known=rule.name, link=rule.places)


def _key(discovery: Discovery) -> Hashable:
    """Return what is equal for one cause on every mesh: the cause itself where it was found, else what is needed."""
    signature, operations, needed = discovery.key
    cause = as_pattern(discovery.cause.partition("; ")[0])
    return signature, operations, cause or frozenset(tag for tag in needed if not tag.startswith("mesh:"))


def _simplicity(cell: Cell) -> tuple[object, ...]:
    return (len(cell.schedule), cell.size, cell)
