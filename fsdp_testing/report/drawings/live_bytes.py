"""What each rank holds over time, and how much it may: a curve per rank, and a bar for each gathered unit."""

from __future__ import annotations

import math

from markupsafe import Markup

from fsdp_testing.cases.records import Portrait, RankPortrait
from fsdp_testing.report.drawings.svg import LEFT, WIDTH, Drawing, bytes_text, clipped, ticks, time_axis
from fsdp_testing.report.drawings.timeline import milliseconds, name_of

CURVE = 130
BAR = 12
ROW = 16
CURVE_STYLES = 4
"""Kinds of lines in the style sheet; more ranks begin again."""


def live_bytes(portrait: Portrait) -> Markup:
    """Return the drawing; empty markup if nothing was recorded."""
    if not portrait.ranks or not portrait.seconds:
        return Markup("")
    units = [unit.unit for unit in portrait.units]
    bars = ROW * len(units) + 10
    drawing = Drawing(24 + CURVE + bars + 22, f"Bytes of parameters held: {account(portrait)}")
    highest = max([portrait.bound_bytes, *(point.amount for rank in portrait.ranks for point in rank.live)]) or 1
    time_axis(drawing, portrait.seconds, 20, 24 + CURVE + bars)
    unit = 1024.0 ** min(int(math.log(highest, 1024)), 4)
    for tick in (unit * number for number in ticks(highest / unit, 4)):
        drawing.line("grid", (LEFT, _y(tick, highest)), (WIDTH - 8, _y(tick, highest)))
        drawing.text(LEFT - 6, _y(tick, highest) + 4, bytes_text(tick), "soft", "end")
    for number, rank in enumerate(portrait.ranks):
        _curve(drawing, rank, number, portrait.seconds, highest)
    bound = _y(portrait.bound_bytes, highest)
    drawing.line("bound", (LEFT, bound), (WIDTH - 8, bound))
    drawing.text(WIDTH - 8, 12, f"bound {bytes_text(portrait.bound_bytes)} (dashed)", "strong", "end")
    _bars(drawing, portrait, units)
    return drawing.markup()


def _y(amount: float, highest: float) -> float:
    return 20 + CURVE * (1 - amount / (1.08 * highest))


def _curve(drawing: Drawing, rank: RankPortrait, number: int, seconds: float, highest: float) -> None:
    scale = (WIDTH - LEFT - 8) / seconds
    points: list[tuple[float, float]] = []
    # Ranks mostly hold the same amount; one curve would hide another.
    shift = 1.6 * number
    for point in rank.live:
        x, y = LEFT + min(point.time, seconds) * scale, _y(point.amount, highest) + shift
        points += [(x, points[-1][1]), (x, y)] if points else [(x, y)]
    if points:
        points.append((WIDTH - 8, points[-1][1]))
    drawing.path(f"curve curve{number % CURVE_STYLES}", points)
    drawing.text(LEFT + 4 + 70 * number, 12, f"rank {rank.rank}", f"key{number % CURVE_STYLES}")


def _bars(drawing: Drawing, portrait: Portrait, units: list[str]) -> None:
    """When each unit is gathered, on the first rank."""
    scale = (WIDTH - LEFT - 8) / portrait.seconds
    for number, unit in enumerate(units):
        y = 24 + CURVE + 6 + ROW * number
        drawing.text(LEFT - 6, y + BAR - 2, clipped(unit or "(root)", LEFT - 10), "soft", "end")
        for stretch in portrait.ranks[0].stretches:
            if stretch.lane == "gathered" and stretch.what == unit:
                length = stretch.stop - stretch.start
                title = f"{name_of(stretch)} gathered on rank 0 for {milliseconds(length)}"
                drawing.box("gathered", LEFT + stretch.start * scale, y, (length * scale, BAR), title)


def account(portrait: Portrait) -> str:
    """Return what the drawing shows, in words."""
    most = [max((point.amount for point in rank.live), default=0) for rank in portrait.ranks]
    facts = ", ".join(f"rank {rank.rank} at most {bytes_text(amount)}" for rank, amount in zip(portrait.ranks, most))
    beyond = [str(rank.rank) for rank, amount in zip(portrait.ranks, most) if amount > portrait.bound_bytes]
    verdict = f"beyond the bound on rank {', '.join(beyond)}" if beyond else "within the bound"
    return f"{facts}; {verdict} of {bytes_text(portrait.bound_bytes)}"
