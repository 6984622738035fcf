"""How does a report become one file that people send to each other? Self-contained HTML: styles and script inside.

The page needs no network and no script to be read; the script adds filtering, jumping between troubles by key, and
copying of replay lines. Everything that comes from a run is escaped by the template engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import resources
from typing import Any, TypeVar

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from fsdp_testing.records import CheckResult, Portrait, RunReport, Verdict
from fsdp_testing.report import summary
from fsdp_testing.report.causes import Cause, causes, explanation_line
from fsdp_testing.report.drawings import layout, live_bytes, timeline

Item = TypeVar("Item")

SLOWEST_SHOWN = 10
FINDINGS_SHOWN = 20


def html_text(report: RunReport) -> str:
    """Return the page."""
    environment = new_environment()
    environment.globals.update(
        summary=summary,
        replay=lambda result: summary.replay_line(result, report),
        explanation_line=explanation_line,
        begun=lambda text: text[:1].upper() + text[1:],
        drawing_patterns=Markup(resource("patterns.html")),
        timeline=timeline,
        live_bytes=live_bytes,
        layout=layout,
        findings_shown=FINDINGS_SHOWN,
        Verdict=Verdict,
    )
    template = environment.from_string(resource("report.html"))
    return template.render(
        report=report,
        style=Markup(resource("report.css") + resource("drawings.css")),
        script=Markup(resource("report.js")),
        **_page(report),
    )


def new_environment() -> Environment:
    """Templates that escape whatever they are given, and fail on a name that they are not given."""
    return Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def resource(name: str) -> str:
    """Return a file of the folder `page`, as text."""
    return (resources.files("fsdp_testing.report") / "page" / name).read_text(encoding="utf-8")


def _page(report: RunReport) -> dict[str, Any]:
    anchors = {id(result): f"r{index}" for index, result in enumerate(report.results)}
    found = causes(report)
    troubles = [(verdict, summary.attention(report, verdict)) for verdict in summary.ATTENTION]
    return {
        "matrix": summary.matrix(report),
        "tallies": summary.tallies(report),
        "troubles": [(verdict, results) for verdict, results in troubles if results],
        "causes": _grouped(((f"c{index}", cause) for index, cause in enumerate(found)), lambda item: item[1]),
        "causes_of": lambda result: [
            (f"c{index}", cause) for index, cause in enumerate(found) if any(r is result for r in cause.results)
        ],
        "portraits": _grouped(report.portraits, lambda portrait: portrait),
        "not_claimed": _grouped(summary.attention(report, Verdict.NOT_CLAIMED), lambda result: result),
        "anchor": lambda result: anchors[id(result)],
        "nearest": summary.nearest(report),
        "slowest": sorted(report.results, key=lambda result: -result.seconds)[:SLOWEST_SHOWN],
        "conclusion": summary.conclusion(report),
        "code": summary.report_exit_code(report),
        "facts": _facts(report),
    }


def _facts(report: RunReport) -> dict[str, str]:
    return {
        **report.environment,
        "backend": report.backend,
        "world sizes": ", ".join(map(str, report.world_sizes)) or "none",
        "duration": f"{report.seconds:.1f} s",
        "checks": str(len({result.check for result in report.results})),
        "cases": str(sum(len(result.cases) for result in report.results)),
    }


def _grouped(
    items: Iterable[Item], of: Callable[[Item], CheckResult | Cause | Portrait]
) -> list[tuple[str, list[Item]]]:
    """Items by implementation, in the order of the run."""
    found: dict[str, list[Item]] = {}
    for item in items:
        found.setdefault(of(item).implementation, []).append(item)
    return list(found.items())
