"""How does an exchange of checkpoints become one file? Who loads what as a picture, and why the rest does not hold."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from fsdp_testing.report.drawings.cube import cube_picture
from fsdp_testing.report.files import write_atomically
from fsdp_testing.report.html import new_environment, resource

if TYPE_CHECKING:
    from fsdp_testing.search.checkpoints.summary import Cause, Summary


_SHADES = {"X": "fail", "?": "unknown", "r": "refused", "=": "pass"}
"""What the drawing calls a state, by its mark."""


def write_checkpoints_page(summary: Summary, directory: Path) -> Path:
    """Write `index.html` into `directory`, which is made if it is missing, and return its path.

    Raises:
        InvalidArgument: The directory cannot be written to.
    """
    path = directory / "index.html"
    numbers = {place: f"{place.split()[0]} {number}" for number, place in enumerate(summary.places, 1)}
    columns: dict[str, dict[str, dict[str, int]]] = {number: {} for number in numbers.values()}
    rows = {place: f"{number}. {place}" for number, place in enumerate(summary.places, 1)}
    for saver, row in summary.cells().items():
        for loader, results in row.items():
            if loader in numbers:
                columns[numbers[loader]][rows[saver]] = dict(Counter(_SHADES[one.mark] for one in results))
    reasons: dict[tuple[str, str], list[Cause]] = {}
    for cause in summary.causes():
        reasons.setdefault((cause.mark, cause.reason), []).append(cause)
    page = new_environment().from_string(resource("checkpoints.html"))
    text = page.render(
        summary=summary,
        reasons=reasons,
        marks={"X": "fails", "?": "unknown", "r": "refused: an error on every rank"},
        picture=cube_picture(columns, list(rows.values()), list(columns)),
        style=Markup(resource("report.css") + resource("drawings.css")),
    )
    write_atomically(path, text, option="--html")
    return path
