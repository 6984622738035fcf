"""The elements that each rank holds: a bar per unit and rank, its parameters in turns of two shades, padding hatched."""

from __future__ import annotations

from markupsafe import Markup

from fsdp_testing.cases.records import Portrait, UnitPortrait
from fsdp_testing.report.drawings.svg import LEFT, WIDTH, Drawing, bytes_text

BAR = 16
ROW = 20
HEAD = 20
GAP = 8


def layout(portrait: Portrait) -> Markup:
    """Return the drawing; empty markup if the run reported no units."""
    if not portrait.units:
        return Markup("")
    height = sum(_height(unit) for unit in portrait.units)
    drawing = Drawing(height, f"Shards: {account(portrait)}")
    top = 0.0
    for unit in portrait.units:
        _unit(drawing, unit, top)
        top += _height(unit)
    return drawing.markup()


def _height(unit: UnitPortrait) -> float:
    return HEAD + ROW * len(unit.held) + GAP


def _unit(drawing: Drawing, unit: UnitPortrait, top: float) -> None:
    drawing.text(0, top + 13, unit.unit or "(root)", "strong")
    drawing.text(WIDTH - 8, top + 13, unit_account(unit), "soft", "end")
    scale = (WIDTH - LEFT - 8) / (unit.longest or 1)
    numbers = {fqn: i for i, fqn in enumerate(dict.fromkeys(span.fqn for held in unit.held for span in held))}
    for rank in range(len(unit.held)):
        y, x = top + HEAD + ROW * rank, float(LEFT)
        drawing.text(LEFT - 6, y + BAR - 4, f"rank {rank}", "soft", "end")
        for span in unit.held[rank]:
            width = (span.stop - span.start) * scale
            title = f"rank {rank}: {span.fqn} [{span.start}, {span.stop})"
            drawing.box(f"shard{numbers[span.fqn] % 2}", x, y, (width, BAR), title)
            drawing.label_in(x, y + BAR - 4, width, span.fqn)
            x += width
        if unit.padding(rank):
            width = unit.padding(rank) * scale
            drawing.box("padding", x, y, (width, BAR), f"rank {rank}: {unit.padding(rank)} elements of padding")
            drawing.label_in(x, y + BAR - 4, width, "padding")


def unit_account(unit: UnitPortrait) -> str:
    """Return a unit in a line."""
    padding = sum(map(unit.padding, range(len(unit.held))))
    facts = f"{unit.elements} elements; {unit.longest} ({bytes_text(unit.longest * unit.element_bytes)}) a rank"
    return f"{facts}; {padding} of padding in all" if padding else f"{facts}; no padding"


def account(portrait: Portrait) -> str:
    """Return what the drawing shows, in words."""
    return "; ".join(f"{unit.unit or '(root)'} {unit_account(unit)}" for unit in portrait.units)
