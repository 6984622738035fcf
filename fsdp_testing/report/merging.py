"""How do the reports of the parts of one run become the report of that run? Each part once, in the order of one run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

from fsdp_testing.errors import InvalidArgument
from fsdp_testing.records import CheckResult, RunReport

_ALIKE_ENVIRONMENT = ("fsdp-testing", "torch", "python")


def merged(reports: Mapping[str, RunReport]) -> RunReport:
    """Return the report of the whole run.

    Results are those of one run, in its order. Causes were looked for in each part by itself: those with the same name
    are shown as one. `seconds` is what the parts took together.

    Args:
        reports: The reports of all parts, by where they come from.

    Raises:
        InvalidArgument: A part is missing or there twice, or parts are not of one run; every offender is listed.
    """
    _refuse(_problems(reports))
    parts = sorted(reports.values(), key=lambda report: report.shard)
    rounds = zip_longest(*(part.results for part in parts))
    results = tuple(result for each in rounds for result in each if result is not None)
    _refuse(_gaps(parts, results))
    portraits = next((part.portraits for part in parts if part.portraits), ())
    seconds = sum(part.seconds for part in parts)
    return replace(parts[0], results=results, shard=(), portraits=portraits, seconds=seconds)


def _refuse(problems: Iterable[str]) -> None:
    if listed := "; ".join(problems):
        raise InvalidArgument(
            f"merge: expected every part of one run once, got: {listed}. "
            "Give the JSON reports of `fsdp-verify run ... --shard 1/N` to `N/N`, all else alike."
        )


def _problems(reports: Mapping[str, RunReport]) -> Iterator[str]:
    """What shows in the heads of the reports."""
    for path, report in reports.items():
        if len(report.shard) != 2:
            yield f"{path} is no part but a whole run"
    parts = {path: report for path, report in reports.items() if len(report.shard) == 2}
    if not parts:
        if not reports:
            yield "no report"
        return
    first, model = next(iter(parts.items()))
    for path, report in parts.items():
        for name, known, other in zip(_NAMES, _alike(model), _alike(report), strict=True):
            if known != other:
                yield f"{path} has {name} {other}, {first} has {known}"
    of = model.shard[1]
    seen = Counter(report.shard[0] for report in parts.values() if report.shard[1] == of)
    for number in range(1, of + 1):
        if seen[number] > 1:
            given = ", ".join(path for path, report in parts.items() if report.shard == (number, of))
            yield f"part {number} of {of} {seen[number]} times ({given})"
        elif not seen[number]:
            yield f"part {number} of {of} is missing"


_NAMES = ("implementations", "world sizes", "backend", *_ALIKE_ENVIRONMENT, "number of parts")


def _alike(report: RunReport) -> tuple[object, ...]:
    """What the parts of one run have in common, as `_NAMES` calls it."""
    versions = [report.environment.get(name, "") for name in _ALIKE_ENVIRONMENT]
    return report.implementations, report.world_sizes, report.backend, *versions, report.shard[1]


def _gaps(parts: Sequence[RunReport], results: Sequence[CheckResult]) -> Iterator[str]:
    """Whether the results are those of one run: the same checks of each implementation, one after the other."""
    names = parts[0].implementations
    checks = list(dict.fromkeys(result.check for result in results))
    expected = [(name, check) for name in names for check in checks]
    got = [(result.implementation, result.check) for result in results]
    if got == expected:
        return
    counted = Counter(got)
    twice = [f"{name} {check} {number} times" for (name, check), number in counted.items() if number > 1]
    lacking = [f"no {name} {check}" for name, check in expected if (name, check) not in counted]
    yield "; ".join(twice + lacking) or "results in another order than that of one run"
