"""The sheet of a comparison of orders: each case with its two sequences side by side, differences marked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fsdp_testing.judging.checkers.event_order import OrderComparison, OrderRow
from fsdp_testing.report.drawings.order import LEFT_OUT, account, order_picture, shown_rows
from fsdp_testing.report.sheet import Block, Cell, Fold, Line, Picture, Row, RowGroup, Section, Sheet, Table, listed
from fsdp_testing.report.summary import world_text

if TYPE_CHECKING:
    from fsdp_testing.explain.trace.order_parity import CaseParity

KINDS = {"≠": "expected_failure", "<": "fail", ">": "pass"}


def parity_sheet(
    cases: Sequence[CaseParity], names: tuple[str, str], environment: Mapping[str, str], *, full: bool = False
) -> Sheet:
    """Return the sheet of differences in order between two implementations.

    Args:
        cases: The cases that were compared.
        names: The implementations, left and right.
        environment: When, by which command and with which versions they were compared.
        full: Show equal stretches far from any difference too.
    """
    different = sum(not case.equal for case in cases)
    outcome = f"{different} of {len(cases)} cases differ" if different else f"the same order in all {len(cases)} cases"
    return Sheet(
        title=f"{names[0]} and {names[1]}: order parity",
        exit_code=1 if different else 0,
        conclusion=f"{names[0]} and {names[1]}: {outcome}",
        sections=tuple(_section(case, number, names, full) for number, case in enumerate(cases, 1)),
        subject="Order parity",
        environment=environment,
        foot="Made by fsdp-testing. Boxes joined by a line are equal; ≠ differ, < only left, > only right.",
    )


def differing_aspects(case: CaseParity) -> list[str]:
    """Aspects in which a case differs on any rank."""
    return list(dict.fromkeys(comparison.aspect for comparison in case.comparisons if not comparison.equal))


def _section(parity: CaseParity, number: int, names: tuple[str, str], full: bool) -> Section:
    case, differing = parity.case, differing_aspects(parity)
    same = dict.fromkeys(comparison.aspect for comparison in parity.comparisons if comparison.aspect not in differing)
    words = f"differ in {listed(differing)}{f' (same {listed(same)})' if same else ''}" if differing else "same order"
    blocks: list[Block] = [Line(fault, "fail") for fault in parity.faults]
    for comparison, ranks in by_rows(parity.comparisons):
        title = f"{comparison.aspect}, rank{'s' if len(ranks) > 1 else ''} {listed(ranks)}: {account(comparison)}"
        picture = order_picture(comparison, *names, full=full)
        table = _table(comparison, names, full=full)
        blocks.append(
            Fold(
                title,
                (Picture(picture, "", f"{title}, of {world_text(case)}", table=table),),
                unfolded=not comparison.equal,
            )
        )
    return Section(
        f"{case.model.name}, {case.strategy}, {case.world.size} ranks: {words}",
        tuple(blocks),
        anchor=f"case{number}",
        entry=world_text(case) + ("" if parity.equal else " ≠"),
        kind="pass" if parity.equal else "expected_failure",
    )


def _table(comparison: OrderComparison, names: tuple[str, str], *, full: bool) -> Table:
    rows = []
    for mark, left, right in shown_rows(comparison.rows, full=full):
        kind = KINDS.get(mark, "meaning" if left == LEFT_OUT else "")
        rows.append(Row(mark, (Cell(left, kind), Cell(right, kind))))
    return Table("", names, (RowGroup(tuple(rows)),))


def by_rows(comparisons: Sequence[OrderComparison]) -> list[tuple[OrderComparison, tuple[int, ...]]]:
    """Comparisons, differing ones first; ranks with the same rows share one, which names them."""
    groups: dict[tuple[str, tuple[OrderRow, ...]], list[OrderComparison]] = {}
    for comparison in comparisons:
        groups.setdefault((comparison.aspect, comparison.rows), []).append(comparison)
    grouped = [(same[0], tuple(comparison.rank for comparison in same)) for same in groups.values()]
    return sorted(grouped, key=lambda item: item[0].equal)
