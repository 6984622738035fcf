"""How does a report become one file that people send to each other? Self-contained HTML: styles and script inside.

The page needs no network and no script to be read; the script adds filtering, jumping between troubles by key, and
copying of replay lines. Everything that comes from a run is escaped by the template engine.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from fsdp_testing.records import CheckResult, Finding, RunReport, Verdict
from fsdp_testing.report import summary
from fsdp_testing.report.files import write_atomically

SLOWEST_SHOWN = 10
FINDINGS_SHOWN = 20


def write_html(report: RunReport, directory: Path) -> Path:
    """Write `index.html` into `directory`, which is made if it is missing, and return its path.

    Raises:
        InvalidArgument: The directory cannot be written to.
    """
    path = directory / "index.html"
    write_atomically(path, html_text(report), option="--html")
    return path


def html_text(report: RunReport) -> str:
    """The page."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.globals.update(
        word=summary.WORDS.__getitem__,
        meaning_of=summary.MEANINGS.__getitem__,
        sentence=summary.sentence,
        accounts=summary.accounts,
        place=summary.place_text,
        size=summary.size_text,
        world=summary.world_text,
        replay=lambda result: summary.replay_line(result, report),
        case_json=lambda finding: finding.case.to_json(indent=1),
        pictures=_pictures,
        findings_shown=FINDINGS_SHOWN,
        Verdict=Verdict,
    )
    template = environment.from_string(_resource("report.html"))
    return template.render(
        report=report,
        style=Markup(_resource("report.css")),
        script=Markup(_resource("report.js")),
        **_page(report),
    )


def _resource(name: str) -> str:
    return (resources.files("fsdp_testing.report") / "page" / name).read_text(encoding="utf-8")


def _page(report: RunReport) -> dict[str, Any]:
    anchors = {id(result): f"r{index}" for index, result in enumerate(report.results)}
    troubles = [(verdict, summary.attention(report, verdict)) for verdict in summary.ATTENTION]
    return {
        "matrix": summary.matrix(report),
        "tallies": summary.tallies(report),
        "troubles": [(verdict, results) for verdict, results in troubles if results],
        "not_claimed": _not_claimed(report),
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


def _not_claimed(report: RunReport) -> list[tuple[str, list[CheckResult]]]:
    found = summary.attention(report, Verdict.NOT_CLAIMED)
    names = summary.implementations(report)
    grouped = [(name, [result for result in found if result.implementation == name]) for name in names]
    return [(name, results) for name, results in grouped if results]


def _pictures(finding: Finding) -> tuple[Markup, ...]:
    """Drawings that belong to a finding (timelines, layouts), as inline SVG; records carry no events to draw yet."""
    del finding
    return ()
