"""How does a comparison of orders become one file? Each case with its two sequences side by side, as pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from fsdp_testing.report.drawings.order import account, order_picture
from fsdp_testing.report.files import write_atomically
from fsdp_testing.report.html import new_environment, resource
from fsdp_testing.report.side_by_side import by_rows
from fsdp_testing.report.summary import world_text

if TYPE_CHECKING:
    from fsdp_testing.explain.trace.order_parity import CaseParity


def write_parity_page(cases: Sequence[CaseParity], names: tuple[str, str], directory: Path, *, full: bool) -> Path:
    """Write `index.html` into `directory`, which is made if it is missing, and return its path.

    Args:
        cases: What was compared.
        names: The implementations, left and right.
        directory: Where to.
        full: Draw equal stretches far from any difference too.

    Raises:
        InvalidArgument: The directory cannot be written to.
    """
    path = directory / "index.html"
    write_atomically(path, parity_text(cases, names, full=full), option="--html")
    return path


def parity_text(cases: Sequence[CaseParity], names: tuple[str, str], *, full: bool = False) -> str:
    """Return the page."""
    left, right = names
    different = sum(not found.equal for found in cases)
    template = new_environment().from_string(resource("parity.html"))
    return template.render(
        cases=cases,
        left=left,
        right=right,
        different=different,
        conclusion=conclusion(different, len(cases)),
        style=Markup(resource("report.css") + resource("drawings.css")),
        world=world_text,
        differing=differing_aspects,
        pictures=lambda found: by_rows(found.comparisons),
        picture=lambda comparison: order_picture(comparison, left, right, full=full),
        account=account,
    )


def conclusion(different: int, count: int) -> str:
    """Return what was found, over all cases."""
    return f"{different} of {count} cases differ" if different else f"the same order in all {count} cases"


def differing_aspects(found: CaseParity) -> list[str]:
    """Aspects in which a case differs on any rank."""
    return list(dict.fromkeys(comparison.aspect for comparison in found.comparisons if not comparison.equal))
