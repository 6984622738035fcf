"""How does a script show what no number shows? It measures one operation: memory that stays, or what goes on the wire.

What is measured beyond what would do is yielded like a result, so that a script reports it as it reports a wrong number.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_testing.cases.models.tree import unit_of
from fsdp_testing.cases.models.tree_schema import parameters
from fsdp_testing.cases.records import Case, FailureKind, Measure, Overrun
from fsdp_testing.checks.findings.discovery import Discovery
from fsdp_testing.checks.findings.wrapping_source import FAMILIES
from fsdp_testing.judging.communication_budget import budget_of
from fsdp_testing.judging.signature import operation_kind


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a script measures.

    Attributes:
        operation: Which operation; None where nothing is measured.
        before: Lines before it, where collectives are counted.
        after: Lines after it.
    """

    operation: int | None = None
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


def measurement_of(found: Discovery) -> Measurement | None:
    """Return what the script of a finding measures; None where it cannot be measured with torch alone."""
    if found.signature.kind not in (FailureKind.KEPT, FailureKind.EXCESS):
        return Measurement()
    overrun = found.overrun
    if overrun is None:
        return None
    where = f"{overrun.operation} {operation_kind(found.case, overrun.operation)}"
    if overrun.measure is Measure.KEPT_PARAMETERS:
        if not FAMILIES[found.implementation].measures:
            return None
        units = tuple(unit for unit, _ in overrun.units)
        line = f"one.beyond(0, lambda: Access.unsharded_bytes(one.model, {units!r}))"
        return Measurement(
            overrun.operation, (), (f"yield {f'{where}, bytes of full parameters that stay'!r}, {line}",)
        )
    what, measured = _WIRE[overrun.measure]
    limit = _limit(found.case, overrun)
    if limit is None:
        return None
    line = f"one.beyond({limit}, lambda: {measured})"
    return Measurement(overrun.operation, ("WIRE.clear()",), (f"yield {f'{where}, {what} beyond {limit}'!r}, {line}",))


_WIRE = {
    Measure.GATHERED_BYTES: ("bytes gathered", 'sum(WIRE.sent["gathers"])'),
    Measure.UNIT_GATHERS: ("gathers", 'len(WIRE.sent["gathers"])'),
    Measure.REDUCTIONS: ("reductions", 'len(WIRE.sent["reductions"])'),
}


def _limit(case: Case, overrun: Overrun) -> int | None:
    """What would do; for gathers of all units as torch does it, where the root stays between the directions."""
    if overrun.measure is not Measure.UNIT_GATHERS:
        return overrun.limit
    budget = budget_of(case)
    kind = operation_kind(case, overrun.operation)
    if budget is None or kind not in ("forward", "forward_backward"):
        return None
    units = {unit_of(spec.module, case.wrapping.units) for spec in parameters(case.model.tree)}
    twice = kind == "forward_backward" and case.strategy in ("full_shard", "hybrid_shard")
    return budget.uses * sum(2 if twice and unit else 1 for unit in units)
