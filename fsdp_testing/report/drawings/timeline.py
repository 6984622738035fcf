"""Who gathers, computes and waits: one row of lanes per rank over a common time."""

from __future__ import annotations

from dataclasses import replace
from difflib import SequenceMatcher

from markupsafe import Markup

from fsdp_testing.cases.records import Portrait, RankPortrait, Stretch
from fsdp_testing.report.drawings.svg import LEFT, WIDTH, Drawing, time_axis

LANE = 20
BAR = 15
RANK_GAP = 14
LANES = (
    ("operation", ("operation",)),
    ("computes", ("forward", "backward")),
    ("collectives", ("collective",)),
    ("waits", ("wait",)),
)
"""Label of a lane, and the stretches that it shows."""
COLLECTIVES = 2
MISSING = "missing"


def timeline(portrait: Portrait, wrong: int | None = None) -> Markup:
    """Return the drawing; empty markup if nothing was recorded.

    Args:
        portrait: The portrait to draw.
        wrong: Index of the operation after which something is wrong; it is marked on every rank.
    """
    if not portrait.ranks or not portrait.seconds:
        return Markup("")
    rank_height = LANE * (len(LANES) + 1) + RANK_GAP
    bottom = rank_height * len(portrait.ranks)
    drawing = Drawing(bottom + 22, f"Timeline: {account(portrait)}")
    time_axis(drawing, portrait.seconds, LANE, bottom)
    for number, rank in enumerate(portrait.ranks):
        _rank(drawing, rank, number * rank_height, portrait.seconds)
        for stretch in missing(portrait, rank):
            _stretch(drawing, stretch, number * rank_height + LANE * (1 + COLLECTIVES), portrait.seconds)
        operations = [stretch for stretch in rank.stretches if stretch.lane == "operation"]
        if wrong is not None and wrong < len(operations):
            _mark(drawing, operations[wrong].stop, number * rank_height, portrait.seconds)
    return drawing.markup()


def missing(portrait: Portrait, rank: RankPortrait) -> list[Stretch]:
    """Return the collectives that this rank did not issue but the rank with the most collectives did, at their times there."""
    issued = {
        other.rank: [stretch for stretch in other.stretches if stretch.lane == "collective"] for other in portrait.ranks
    }
    most, own = max(issued.values(), key=len), issued[rank.rank]
    due, issued_here = ([stretch.what for stretch in stretches] for stretches in (most, own))
    absent: list[Stretch] = []
    for what, start, stop, _, _ in SequenceMatcher(None, due, issued_here, autojunk=False).get_opcodes():
        if what == "delete":
            absent += [replace(stretch, lane=MISSING) for stretch in most[start:stop]]
    return absent


def _rank(drawing: Drawing, rank: RankPortrait, top: float, seconds: float) -> None:
    drawing.text(0, top + BAR - 2, f"rank {rank.rank}", "strong")
    for index, (name, lanes) in enumerate(LANES, start=1):
        y = top + LANE * index
        drawing.text(LEFT - 6, y + BAR - 4, name, "soft", "end")
        for stretch in rank.stretches:
            if stretch.lane in lanes:
                _stretch(drawing, stretch, y, seconds)


def _stretch(drawing: Drawing, stretch: Stretch, y: float, seconds: float) -> None:
    scale = (WIDTH - LEFT - 8) / seconds
    x, width = LEFT + stretch.start * scale, (stretch.stop - stretch.start) * scale
    name = name_of(stretch)
    title = f"{stretch.lane} {name}: {milliseconds(stretch.stop - stretch.start)} from {milliseconds(stretch.start)}"
    if stretch.lane == MISSING:
        title, name = f"missing here: {name}, which another rank issued", f"no {name}"
    drawing.box(stretch.lane, x, y, (width, BAR), title)
    if stretch.lane != "wait":
        kind = {"operation": "", MISSING: "moment"}.get(stretch.lane, "inside")
        label = name.partition(" ")[0] if stretch.lane == "collective" else name
        drawing.label_in(x, y + BAR - 4, width, label, kind)


def _mark(drawing: Drawing, time: float, top: float, seconds: float) -> None:
    """A line at the moment after which something is wrong."""
    x = LEFT + time * (WIDTH - LEFT - 8) / seconds
    drawing.line("moment", (x, top + BAR), (x, top + LANE * (len(LANES) + 1)))
    drawing.text(x, top + BAR - 2, "wrong from here", "moment", "end" if x > WIDTH / 2 else "start")


def name_of(stretch: Stretch) -> str:
    """Return the name of the unit or operation of a stretch; the root unit has no name of its own."""
    return stretch.what or "(root)"


def milliseconds(seconds: float) -> str:
    """Return the seconds as milliseconds."""
    return f"{1000 * seconds:.3g} ms"


def account(portrait: Portrait) -> str:
    """Return what the drawing shows, in a sentence for each rank."""
    facts = []
    for rank in portrait.ranks:
        waited = sum(stretch.stop - stretch.start for stretch in rank.stretches if stretch.lane == "wait")
        collectives = sum(stretch.lane == "collective" for stretch in rank.stretches)
        gathers = sum(stretch.lane == "gathered" for stretch in rank.stretches)
        lacks = f", {len(absent)} missing" if (absent := missing(portrait, rank)) else ""
        facts.append(
            f"rank {rank.rank}: gathers: {gathers}, collectives: {collectives}{lacks}, waiting "
            f"{milliseconds(waited)} of {milliseconds(portrait.seconds)}"
        )
    return "; ".join(facts)
