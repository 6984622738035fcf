"""How is the order of two implementations shown? Two columns, what differs marked, long equal stretches left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from fsdp_testing.judging.checkers.event_order import OrderComparison, OrderRow

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
            yield "", LEFT_OUT, f"{gap} equal rows"
            gap = 0
        one_sided = "<" if not row.right else ">" if not row.left else "≠"
        yield "" if row.same else one_sided, row.left, row.right
    if gap:
        yield "", LEFT_OUT, f"{gap} equal rows"


def by_rows(comparisons: Sequence[OrderComparison]) -> list[tuple[OrderComparison, tuple[int, ...]]]:
    """Comparisons, those of ranks that show the same rows shown once, with these ranks; those that differ first."""
    found: dict[tuple[str, tuple[OrderRow, ...]], list[OrderComparison]] = {}
    for comparison in comparisons:
        found.setdefault((comparison.aspect, comparison.rows), []).append(comparison)
    grouped = [(same[0], tuple(comparison.rank for comparison in same)) for same in found.values()]
    return sorted(grouped, key=lambda item: item[0].equal)


def by_difference(comparisons: Sequence[OrderComparison]) -> list[tuple[OrderComparison, tuple[int, ...]]]:
    """Of the same those that differ."""
    return [item for item in by_rows(comparisons) if not item[0].equal]
