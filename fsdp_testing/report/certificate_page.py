"""How does a certificate become one file? What holds, where it fails, and the shortest schedule of each cause."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from fsdp_testing.report.drawings.cube import cube_picture
from fsdp_testing.report.files import write_atomically
from fsdp_testing.report.html import new_environment, resource

if TYPE_CHECKING:
    from fsdp_testing.search.certificate.summary import Summary


def write_certificate_page(summary: Summary, rows: Sequence[str], worlds: Sequence[str], directory: Path) -> Path:
    """Write `index.html` into `directory`, which is made if it is missing, and return its path.

    Args:
        summary: What was found.
        rows: Faces in the order in which they are drawn.
        worlds: Strategies with their meshes, likewise.
        directory: Where to.

    Raises:
        InvalidArgument: The directory cannot be written to.
    """
    path = directory / "index.html"
    page = new_environment().from_string(resource("certificate.html"))
    shown = [face for face in rows if any(face in faces for faces in summary.faces.values())]
    text = page.render(
        summary=summary,
        picture=cube_picture(summary.faces, shown, [world for world in worlds if world in summary.faces]),
        style=Markup(resource("report.css") + resource("drawings.css")),
    )
    write_atomically(path, text, option="--html")
    return path
