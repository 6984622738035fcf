"""Draws docs/pictures: what a run prints of a silent bug of torch's FSDP2, as the README shows it.

    python ci/pictures.py

The picture is the terminal's own report of a run made for it; tests/docs/test_pictures.py runs the check again and
compares the words. Nothing in it is written by hand.
"""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from fsdp_testing import run_conformance
from fsdp_testing.cases.records import RunReport
from fsdp_testing.report.conformance import short_sheet
from fsdp_testing.report.terminal import print_sheet, say_ending

PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "silent-bug.svg"
NAME, CHECK = "torch-fsdp2", "forward_only.eval"
WIDTH = 104
RED, GREEN, YELLOW, BLUE = (255, 154, 159), (133, 216, 147), (242, 196, 100), (134, 183, 255)
PINK, CYAN, WHITE, GREY, BLACK = (234, 156, 240), (127, 209, 210), (231, 234, 240), (120, 126, 138), (18, 21, 26)
COLOURS = [RED, GREEN, YELLOW, BLUE, PINK, CYAN, WHITE]
THEME = TerminalTheme(BLACK, WHITE, [BLACK, *COLOURS], [GREY, *COLOURS])
FORMAT = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img" aria-label="Output of a run">
<style>
.{unique_id}-title {{ font: 600 {char_height}px system-ui, sans-serif; }}
.{unique_id}-matrix {{ font: {char_height}px/{line_height}px ui-monospace, Consolas, monospace; }}
{styles}
</style>
<defs>{lines}
<clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" height="{terminal_height}"/></clipPath></defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g></g>
</svg>
"""


class Recorder(Console):
    """A console that breaks every line at its width, for a picture does not scroll."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print, broken."""
        super().print(*objects, **{**options, "soft_wrap": False})


def judged() -> RunReport:
    """Run the check; what depends on the machine is left out."""
    report = run_conformance(NAME, checks=(CHECK,), explain=600.0)
    return replace(report, environment={"torch": report.environment["torch"].partition("+")[0]})


def picture(report: RunReport) -> str:
    """Return the report as it looks in a terminal, after the command that gives it."""
    console = Recorder(width=WIDTH, record=True, force_terminal=True, color_system="truecolor", file=io.StringIO())
    console.print(Text.assemble(("$ ", "green"), (f"fsdp-verify run {NAME} --check {CHECK}", "bold")))
    sheet = short_sheet(report)
    print_sheet(sheet, console)
    say_ending(sheet, console)
    return console.export_svg(title="fsdp-verify", theme=THEME, code_format=FORMAT, unique_id="run")


def words(svg: str) -> str:
    """Return the text of a picture, numbers and identities as `#`: times and last digits depend on the machine."""
    texts = ("".join(part.itertext()) for part in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text"))
    return re.sub(
        r"\b[0-9a-f]{12}\b|\b\d[\d.]*(e[+-]?\d+)?\b",
        "#",
        " ".join(" ".join(texts).replace("\N{NO-BREAK SPACE}", " ").split()),
    )


def main() -> None:
    """Draw the picture anew."""
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(picture(judged()), encoding="utf-8")


if __name__ == "__main__":
    main()
