"""A drawing as markup: elements in the order they are drawn; every text is escaped."""

from __future__ import annotations

import math
from collections.abc import Iterator

from markupsafe import Markup

WIDTH = 960
"""Width of every drawing, in user units; the page scales it, and phones can scroll it."""

LEFT = 92
"""Left edge of time axes and shards; labels stand left of it."""

LETTER = 6.4
"""Width of a letter at the usual size, roughly: a label that would not fit is left out."""


class Drawing:
    """One SVG element in the making.

    Args:
        height: Height in user units.
        label: What it shows, for readers who cannot see it.
    """

    def __init__(self, height: float, label: str) -> None:
        self._height = height
        self._label = label
        self._parts: list[Markup] = []

    def box(self, kind: str, x: float, y: float, size: tuple[float, float], title: str = "") -> None:
        """A rectangle of class `kind` whose upper left corner is (x, y), with a title for the pointer."""
        width, height = max(size[0], 1.0), size[1]
        hint = Markup("<title>{}</title>").format(title) if title else ""
        self._parts.append(
            Markup('<rect class="{}" x="{}" y="{}" width="{}" height="{}">{}</rect>').format(
                kind, _short(x), _short(y), _short(width), _short(height), hint
            )
        )

    def line(self, kind: str, start: tuple[float, float], stop: tuple[float, float]) -> None:
        """A straight line of class `kind`."""
        numbers = [_short(number) for number in (*start, *stop)]
        self._parts.append(Markup('<line class="{}" x1="{}" y1="{}" x2="{}" y2="{}"/>').format(kind, *numbers))

    def path(self, kind: str, points: list[tuple[float, float]]) -> None:
        """A line of class `kind` through all points."""
        steps = " ".join(f"{'M' if index == 0 else 'L'}{_short(x)} {_short(y)}" for index, (x, y) in enumerate(points))
        self._parts.append(Markup('<path class="{}" d="{}"/>').format(kind, steps))

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        """A text whose baseline begins (or ends, or has its middle) at (x, y)."""
        self._parts.append(
            Markup('<text class="{}" x="{}" y="{}" text-anchor="{}">{}</text>').format(
                kind, _short(x), _short(y), anchor, text
            )
        )

    def label_in(self, x: float, y: float, width: float, text: str, kind: str = "inside") -> None:
        """A text in the middle of a box of that width, if it fits; the end of a name if that fits and says something."""
        last = text.rpartition(".")[2]
        for label in dict.fromkeys((text, last if not last.isdigit() else "")):
            if label and len(label) * LETTER + 4 <= width:
                self.text(x + width / 2, y, label, kind, "middle")
                return

    def markup(self) -> Markup:
        """Return the whole element."""
        opening = Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">').format(
            WIDTH, _short(self._height), self._label
        )
        return opening + Markup("").join(self._parts) + Markup("</svg>")


def _short(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")


def clipped(text: str, width: float) -> str:
    """Return the text, its beginning left out where it is wider than `width`; names differ most at their end."""
    most = max(int(width / LETTER), 2)
    return text if len(text) <= most else f"…{text[len(text) - most + 1 :]}"


def ticks(stop: float, count: int = 8) -> Iterator[float]:
    """Round numbers from zero to `stop`, at most about `count` of them."""
    if not stop > 0 or not math.isfinite(stop):
        return
    raw = stop / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    for number in range(int(stop / step) + 1):
        yield number * step


def bytes_text(count: float) -> str:
    """Format bytes with a unit."""
    if count < 1024:
        return f"{count:g} B"
    power = min(int(math.log(count, 1024)), 4)
    size = count / 1024**power
    return f"{size:.{4 if size >= 1000 else 3}g} {['B', 'KiB', 'MiB', 'GiB', 'TiB'][power]}"


def time_axis(drawing: Drawing, seconds: float, top: float, bottom: float) -> None:
    """Ticks in milliseconds below `bottom`, with lines from `top` to there."""
    for tick in ticks(seconds):
        x = LEFT + (WIDTH - LEFT - 8) * tick / seconds
        drawing.line("grid", (x, top), (x, bottom))
        drawing.text(x, bottom + 14, f"{1000 * tick:g} ms", "soft", "middle")
