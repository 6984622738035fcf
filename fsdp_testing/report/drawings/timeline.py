"""Who gathers, computes and waits: one row of lanes per rank over a common time."""

from __future__ import annotations

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


def timeline(portrait: Portrait, wrong: int | None = None) -> Markup:
    """Return the drawing; empty markup if nothing was recorded.

    Args:
        portrait: What is drawn.
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
        operations = [stretch for stretch in rank.stretches if stretch.lane == "operation"]
        if wrong is not None and wrong < len(operations):
            _mark(drawing, operations[wrong].stop, number * rank_height, portrait.seconds)
    return drawing.markup()


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
    drawing.box(stretch.lane, x, y, (width, BAR), title)
    if stretch.lane != "wait":
        kind = "" if stretch.lane == "operation" else "inside"
        label = name.partition(" ")[0] if stretch.lane == "collective" else name
        drawing.label_in(x, y + BAR - 4, width, label, kind)


def _mark(drawing: Drawing, time: float, top: float, seconds: float) -> None:
    """A line at the moment after which something is wrong."""
    x = LEFT + time * (WIDTH - LEFT - 8) / seconds
    drawing.line("moment", (x, top + BAR), (x, top + LANE * (len(LANES) + 1)))
    drawing.text(x, top + BAR - 2, "wrong from here", "moment", "end" if x > WIDTH / 2 else "start")


def name_of(stretch: Stretch) -> str:
    """Return what a stretch is about; the root unit has no name of its own."""
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
        facts.append(
            f"rank {rank.rank}: gathers: {gathers}, collectives: {collectives}, waiting "
            f"{milliseconds(waited)} of {milliseconds(portrait.seconds)}"
        )
    return "; ".join(facts)
