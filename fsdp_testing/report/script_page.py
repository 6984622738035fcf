"""How does the verdict on a training script become one file? Each number of ranks with its reason and what was compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from fsdp_testing.report.html import new_environment, resource

if TYPE_CHECKING:
    from fsdp_testing.train.report import TrainReport


def script_text(report: TrainReport, facts: Mapping[str, Any]) -> str:
    """Return the page.

    Args:
        report: The verdicts.
        facts: Arguments, steps, seconds and environment of the run.
    """
    page = new_environment().from_string(resource("script.html"))
    return page.render(report=report, facts=facts, style=Markup(resource("report.css")))
