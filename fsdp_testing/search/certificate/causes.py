"""The causes of failing cells: known failures are named; of the others, the simplest are investigated like any suspect."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from fsdp_testing.cases.drawing import legal_case, needs_of_case
from fsdp_testing.cases.records import Case, Operation
from fsdp_testing.checks.findings.discovery import Discovery
from fsdp_testing.judging.known import KnownFailures, Rule
from fsdp_testing.judging.signature import Signature, as_pattern
from fsdp_testing.search.certificate.axes import Cell
from fsdp_testing.search.certificate.cases import case_of
from fsdp_testing.search.certificate.certify import Certificate
from fsdp_testing.search.investigation import Causes, Investigator, Suspect
from fsdp_testing.search.loop import Budget

_SHRINK_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class CellCause:
    """One cause, as far as is known.

    Attributes:
        cell: The simplest cell that shows it, of those that ran.
        cells: How many of the cells that ran fail by it.
        signature: The signature of the failure there.
        reason: The first fact that differs.
        case: The shortest case that shows it; if there was no time to shorten it, the case of the cell.
        shortened: Whether it was shortened.
        known: Name of the known failure; empty if it is not known.
        link: Address of the report.
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
    """Finds the causes of failing cells, as a campaign does: known failures are counted, new ones are investigated.

    Args:
        certificate: The certificate of what ran.
        known: Known failures of the implementation.
        seconds: Time for all causes; cells that are not reached are only counted.
    """

    def __init__(self, certificate: Certificate, known: KnownFailures, seconds: float) -> None:
        self._certificate = certificate
        self._capabilities = certificate.plan.implementation.capabilities
        self._known = Causes(known)
        self._budget = Budget(seconds)
        self._causes: dict[Hashable, CellCause] = {}
        self._keys: dict[str, Hashable] = {}
        self.unexplained = 0

    def find(self) -> list[CellCause]:
        """Return the causes, those with the most cells first. `unexplained` has the cells for which there was no time."""
        self._budget.restart()
        for cell in sorted(self._certificate.failing(), key=lambda cell: (len(cell.schedule), cell.size, cell)):
            reason = self._certificate.reason(cell)
            signature = reason.signature
            assert signature is not None
            case = case_of(cell, self._capabilities)
            cause = CellCause(cell, 1, str(signature), reason.text, case)
            rule = self._known.rules.recognize(signature, case) or self._known.by_looks(signature, case)
            late = self._budget.time_is_up()
            if rule is not None and (late or rule.name in self._keys or not rule.asks_cause(signature)):
                self._count(self._keys.get(rule.name, rule.name), _known_as(cause, rule))
            elif late:
                self.unexplained += 1
            else:
                self._look_closer(cause, signature)
        return sorted(self._causes.values(), key=lambda cause: -cause.cells)

    def _look_closer(self, cause: CellCause, signature: Signature) -> None:
        investigator = Investigator(
            self._certificate.plan.implementation.reference,
            lambda case: legal_case(case, self._capabilities),
            lambda case: needs_of_case(case) <= self._capabilities,
            self._budget.left(_SHRINK_SECONDS),
        )
        suspect = Suspect(cause.case, signature, cause.reason)
        answer = investigator.investigate(self._certificate.runner.cases, suspect, self._known.rules)
        discovery = answer.discovery if answer is not None else None
        key: Hashable = cause.cell
        if discovery is not None:
            key, shortened = _key(discovery), discovery.confirmed
            looks = str(discovery.signature)
            cause = replace(cause, signature=looks, reason=discovery.reason, case=discovery.case, shortened=shortened)
        if answer is not None and answer.known is not None:
            # The rule of a cause that was found before leads to the record of that cause.
            known = answer.known
            key, cause = self._keys.setdefault(known.name, known.name), _known_as(cause, known)
            self._known.learn(signature, known.name)
        elif discovery is not None and discovery.confirmed:
            # Other cells with this signature, or with the traits that this cell needs, have the same cause.
            self._keys[self._known.add(discovery, signature).name] = key
        self._count(key, cause)

    def _count(self, key: Hashable, cause: CellCause) -> None:
        earlier = self._causes.get(key)
        self._causes[key] = cause if earlier is None else replace(earlier, cells=earlier.cells + cause.cells)


def _known_as(cause: CellCause, rule: Rule) -> CellCause:
    return replace(cause, known=rule.name, link=rule.places)


def _key(discovery: Discovery) -> Hashable:
    """Return a key that is equal for one cause on every mesh: the cause if it was found, else the traits that it needs."""
    signature, operations, needed = discovery.key
    cause = as_pattern(discovery.cause.partition("; ")[0])
    return signature, operations, cause or frozenset(tag for tag in needed if not tag.startswith("mesh:"))
