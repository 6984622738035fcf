"""How is the order of two implementations shown? Two columns, what differs marked, long equal stretches left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from fsdp_testing.checkers.order import OrderComparison, OrderRow

CONTEXT_ROWS = 2
LEFT_OUT = "..."


def order_table(comparison: OrderComparison, left: str, right: str, *, full: bool = False) -> Table:
    """Draw one comparison.

    Args:
        comparison: One aspect on one rank.
        left: Name of the implementation on the left.
        right: Name of the one on the right.
        full: Show equal rows far from any difference too.
    """
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    table.add_column("")  # the mark: colour alone says nothing
    table.add_column(Text(left), overflow="fold", ratio=1)
    table.add_column(Text(right), overflow="fold", ratio=1)
    for mark, one, other in shown_rows(comparison.rows, full=full):
        style = {"≠": "yellow", "<": "red", ">": "green"}.get(mark, "dim" if one == LEFT_OUT else "")
        table.add_row(Text(mark, style=style), Text(one, style=style), Text(other, style=style))
    return table


def shown_rows(rows: Sequence[OrderRow], *, full: bool) -> Iterator[tuple[str, str, str]]:
    """(mark, left, right) of every row to be shown: `≠` differ, `<` only left, `>` only right, blank the same."""
    different = [index for index, row in enumerate(rows) if not row.same]
    near = {
        place for index in different for place in range(index - CONTEXT_ROWS, index + CONTEXT_ROWS + 1)
    }  # of a comparison without differences nothing is near
    gap = 0
    for index, row in enumerate(rows):
        if not full and index not in near:
            gap += 1
            continue
        if gap:
            yield _left_out(gap)
            gap = 0
        yield _mark(row), row.left, row.right
    if gap:
        yield _left_out(gap)


def _left_out(count: int) -> tuple[str, str, str]:
    return "", LEFT_OUT, f"{count} equal rows"


def _mark(row: OrderRow) -> str:
    if row.same:
        return ""
    if not row.right:
        return "<"
    return ">" if not row.left else "≠"


def by_difference(comparisons: Sequence[OrderComparison]) -> list[tuple[OrderComparison, tuple[int, ...]]]:
    """Comparisons that differ, those of ranks that show the same rows shown once, with these ranks."""
    found: dict[tuple[str, tuple[OrderRow, ...]], list[OrderComparison]] = {}
    for comparison in comparisons:
        if not comparison.equal:
            found.setdefault((comparison.aspect, comparison.rows), []).append(comparison)
    return [(same[0], tuple(comparison.rank for comparison in same)) for same in found.values()]
