"""How does a report become one file that people send to each other? Self-contained HTML: styles and script inside.

The page needs no network and no script to be read; the script adds filtering, jumping between troubles by key, and
copying of replay lines. Everything that comes from a run is escaped by the template engine.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from importlib import resources
from typing import Any, TypeVar

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from fsdp_testing.base.documentation import folder
from fsdp_testing.base.printable import printable
from fsdp_testing.cases.records import CheckResult, Finding, Portrait, RunReport, Verdict
from fsdp_testing.judging.entry import entry_line
from fsdp_testing.report import answers, summary
from fsdp_testing.report.causes import Cause, causes, explanation_line
from fsdp_testing.report.drawings import layout, live_bytes, timeline

Item = TypeVar("Item")

SLOWEST_SHOWN = 10
FINDINGS_SHOWN = 20
CAUSES_AT_SIGHT = 4


def html_text(report: RunReport) -> str:
    """Return the page."""
    environment = new_environment()
    environment.filters["own_name"] = lambda name: report.own_names.get(name, name)
    environment.globals.update(
        summary=summary,
        linked=linked,
        entry_line=entry_line,
        replay=lambda result: summary.replay_line(result, report),
        explanation_line=explanation_line,
        moments=answers.moments,
        wrong_at=lambda cause: next((at for at, moment in enumerate(answers.moments(cause)) if moment.said), None),
        causes_at_sight=CAUSES_AT_SIGHT,
        suite_state=suite_state,
        begun=begun,
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


def linked(text: str) -> Markup:
    """Return the text, escaped, with its web addresses and pages of the documentation as links; nothing else becomes one."""
    if (place := folder()) is not None and text.startswith("docs/") and (place / text).is_file():
        return Markup('<a href="{}">{}</a>').format((place / text).as_uri(), text)
    pieces = re.split(f"({summary.ADDRESS})", text)
    return Markup("").join(
        Markup('<a href="{0}" rel="noreferrer">{0}</a>').format(piece) if index % 2 else piece
        for index, piece in enumerate(pieces)
    )


def begun(text: str) -> str:
    """Return the text with a capital letter, unless it begins with a name in code such as `zero_grad`."""
    return text[:1].upper() + text[1:] if text.partition(" ")[0].strip(",:;").isalpha() else text


def new_environment() -> Environment:
    """Templates that escape whatever they are given, and fail on a name that they are not given."""
    return Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_without_control
    )


def _without_control(value: Any) -> Any:
    """Write control characters out: HTML cannot hold them, and a page is also read in terminals."""
    if isinstance(value, Markup):
        return Markup(printable(value))
    return printable(value) if isinstance(value, str) else value


def resource(name: str) -> str:
    """Return a file of the folder `page`, as text."""
    return (resources.files("fsdp_testing.report") / "page" / name).read_text(encoding="utf-8")


def _page(report: RunReport) -> dict[str, Any]:
    anchors = {id(result): f"r{index}" for index, result in enumerate(report.results)}
    found = causes(report)
    explained_first = sorted(found, key=lambda cause: cause.explanation is None)
    new = [cause for cause in explained_first if not cause.expected]
    places: dict[str, list[tuple[str, Cause | summary.Known]]] = {
        "c": [(f"c{index}", cause) for index, cause in enumerate(new)],
        "k": [(f"k{index}", group) for index, group in enumerate(summary.known_failures(report))],
    }
    troubles = [(verdict, summary.attention(report, verdict)) for verdict in summary.ATTENTION]
    return {
        "matrix": summary.matrix(report),
        "tallies": summary.tallies(report),
        "troubles": [(verdict, results) for verdict, results in troubles if results],
        "causes": places["c"],
        "known": [
            (place, group, [cause for cause in explained_first if _overlap(cause.findings, group.findings)])
            for place, group in places["k"]
        ],
        "places_of": lambda result: [
            (place, group)
            for named in places.values()
            for place, group in named
            if _overlap(result.findings, group.findings)
        ],
        "portraits": _grouped(report.portraits, lambda portrait: portrait),
        "not_claimed": _grouped(summary.attention(report, Verdict.NOT_CLAIMED), lambda result: result),
        "anchor": lambda result: anchors[id(result)],
        "nearest": summary.nearest(report),
        "slowest": sorted(report.results, key=lambda result: -result.seconds)[:SLOWEST_SHOWN],
        "conclusion": summary.conclusion(report),
        "headline": summary.headline(report),
        "state": answers.state(report),
        "trust": answers.trust(report),
        "advice": answers.advice(report),
        "facts": _facts(report),
    }


def _overlap(one: tuple[Finding, ...], other: tuple[Finding, ...]) -> bool:
    """Whether a finding is in both; by identity, for comparing two that are equal takes long."""
    return not {id(result) for result in one}.isdisjoint(map(id, other))


def _facts(report: RunReport) -> dict[str, str]:
    return {
        **report.environment,
        "backend": report.backend,
        "world sizes": ", ".join(map(str, report.world_sizes)) or "none",
        "duration": f"{report.seconds:.1f} s",
        "checks": str(len({result.check for result in report.results})),
        "cases": str(sum(len(result.cases) for result in report.results)),
    }


def suite_state(rows: Iterable[summary.Row]) -> tuple[str, bool]:
    """Return how the checks of one suite came out, in words, and whether a reader must look at them."""
    verdicts = [result.verdict for row in rows for result in row.results if result is not None]
    counts = {verdict: verdicts.count(verdict) for verdict in Verdict if verdict in verdicts}
    if set(counts) <= {Verdict.PASS, Verdict.NOT_CLAIMED} and Verdict.PASS in counts:
        return "all that is claimed holds", False
    words = ", ".join(f"{count} {summary.WORDS[verdict]}" for verdict, count in counts.items())
    return words, bool({Verdict.FAIL, Verdict.UNKNOWN, Verdict.STALE} & set(counts))


def _grouped(items: Iterable[Item], of: Callable[[Item], CheckResult | Portrait]) -> list[tuple[str, list[Item]]]:
    """Items by implementation, in the order of the run."""
    found: dict[str, list[Item]] = {}
    for item in items:
        found.setdefault(of(item).implementation, []).append(item)
    return list(found.items())
