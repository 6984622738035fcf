"""Two sequences side by side: equal steps are joined by a line, others stand alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from markupsafe import Markup

from fsdp_testing.judging.checkers.event_order import OrderComparison, OrderRow
from fsdp_testing.report.drawings.svg import WIDTH, Drawing, clipped

CONTEXT_ROWS = 2
LEFT_OUT = "..."
ROW = 20
BAR = 16
COLUMN = 440
RIGHT = WIDTH - COLUMN
HEAD = 24
MISSING = "missing"
KINDS = {"≠": ("changed", "changed"), "<": ("only-left", MISSING), ">": (MISSING, "only-right"), "": ("step", "step")}
"""Classes of the left and right box by the mark of a row."""


def order_picture(comparison: OrderComparison, left: str, right: str, *, full: bool = False) -> Markup:
    """Return the drawing of one aspect on one rank; equal stretches far from any difference are left out unless `full`."""
    rows = list(shown_rows(comparison.rows, full=full))
    drawing = Drawing(HEAD + ROW * len(rows), f"{comparison.aspect} on rank {comparison.rank}: {account(comparison)}")
    drawing.text(COLUMN / 2, 14, left, "strong", "middle")
    drawing.text(RIGHT + COLUMN / 2, 14, right, "strong", "middle")
    for number, (mark, left_step, right_step) in enumerate(rows):
        y = HEAD + ROW * number
        if left_step == LEFT_OUT:
            drawing.text(WIDTH / 2, y + BAR - 4, f"{LEFT_OUT} {right_step} {LEFT_OUT}", "soft", "middle")
            continue
        for x, kind, text in zip((0, RIGHT), KINDS[mark], (left_step, right_step)):
            drawing.box(kind, x, y, (COLUMN, BAR), text or "missing here")
            if text:
                style = "soft" if text.startswith("—") else ""
                drawing.text(x + 6, y + BAR - 4, clipped(text, COLUMN - 12), style)
        if not mark:
            drawing.line("same", (COLUMN, y + BAR / 2), (RIGHT, y + BAR / 2))
        else:
            drawing.text(WIDTH / 2, y + BAR - 4, mark, "strong", "middle")
    return drawing.markup()


def account(comparison: OrderComparison) -> str:
    """Return what the drawing shows, in words."""
    counts = Counter(mark for mark, _, _ in shown_rows(comparison.rows, full=True))
    words = {"": "equal", "≠": "different", "<": "only left", ">": "only right"}
    return ", ".join(f"{counts[mark]} {what}" for mark, what in words.items() if counts[mark]) or "nothing happens"


def shown_rows(rows: Sequence[OrderRow], *, full: bool) -> Iterator[tuple[str, str, str]]:
    """(mark, left, right) of every row to be shown: `≠` differ, `<` only left, `>` only right, blank the same."""
    different = [index for index, row in enumerate(rows) if not row.same]
    near = {
        place for index in different for place in range(index - CONTEXT_ROWS, index + CONTEXT_ROWS + 1)
    }  # without differences no row is near one
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
