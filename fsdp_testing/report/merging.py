"""Merges the parts of one whole: each part once, in the order of one run.

Parts of a run, a certificate or a campaign are checked and ordered here; each states its settings (`Part.alike`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

from fsdp_testing.cases.records import CheckResult, Request, RunReport, Verdict
from fsdp_testing.errors import InvalidArgument

# Up to this many adjacent parts are named one by one.
_MISSING_BY_NAME = 3
_ANOTHER_RUN = "Give the reports of one run, all of one version."
_ALIKE_ENVIRONMENT = ("fsdp-testing", "torch", "python")

P = TypeVar("P")


def merged(reports: Mapping[str, RunReport]) -> RunReport:
    """Return the report of the whole run.

    Results have the order of a single run; a check without a result in its part is unknown. Each part searched for causes on
    its own; causes with the same name are shown as one. `seconds` is the sum over the parts.

    Args:
        reports: The reports of all parts, by where they come from.

    Raises:
        InvalidArgument: A part is missing or there twice, or parts are not of one run; every offender is listed.
    """
    advice = "Give the JSON reports of `fsdp-verify run ... --shard 1/N` to `N/N`, with equal options."
    parts = in_order(reports, lambda report: Part(report.shard, _alike(report)), advice)
    nameless = [
        f"{path} does not say which checks were requested" for path, report in reports.items() if not report.request
    ]
    _refuse(nameless, "It is of an earlier version: run it again.")
    _refuse((text for path, part in parts.items() for text in _strangers(path, part)), _ANOTHER_RUN)
    first = next(iter(parts.values()))
    found = {(result.implementation, result.check): result for part in parts.values() for result in part.results}
    results = tuple(
        found.get(pair) or _without_result(pair, list(parts)[number % len(parts)])
        for number, pair in enumerate(_pairs(first))
    )
    portraits = next((part.portraits for part in parts.values() if part.portraits), ())
    seconds = sum(part.seconds for part in parts.values())
    since = {key: date for part in parts.values() for key, date in part.since.items()}
    return replace(first, results=results, shard=(), portraits=portraits, seconds=seconds, since=since)


@dataclass(frozen=True, slots=True)
class Part:
    """Facts that decide whether parts belong together: the index `(i, n)` or empty, and the shared settings by name."""

    shard: tuple[int, ...]
    alike: Mapping[str, object]


def in_order(given: Mapping[str, P], part_of: Callable[[P], Part], advice: str) -> dict[str, P]:
    """Return the parts of one whole in their order.

    Args:
        given: The parts, by where they come from.
        part_of: Gives the facts of a part.
        advice: A replacement for what is refused.

    Raises:
        InvalidArgument: One is missing or there twice, or they are not of one whole; every offender is listed.
    """
    parts = {path: part_of(part) for path, part in given.items()}
    _refuse(_problems(parts), advice)
    return {path: given[path] for path in sorted(given, key=lambda path: parts[path].shard)}


def added(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    """Return the sums of the counts of all parts."""
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return total


def versions_of(environment: Mapping[str, str]) -> dict[str, object]:
    """Return the versions that all parts share, by name."""
    return {name: environment.get(name, "") for name in _ALIKE_ENVIRONMENT}


def _refuse(problems: Iterable[str], advice: str) -> None:
    if listed := "; ".join(problems):
        raise InvalidArgument(f"merge: expected every part of one run once, got: {listed}. {advice}")


def _problems(given: Mapping[str, Part]) -> Iterator[str]:
    for path, part in given.items():
        if len(part.shard) != 2:
            yield f"{path} is a whole run, not a part"
    parts = {path: part for path, part in given.items() if len(part.shard) == 2}
    if not parts:
        if not given:
            yield "no report"
        return
    first, model = next(iter(parts.items()))
    of = model.shard[1]
    for path, part in parts.items():
        for name in {**model.alike, **part.alike}:
            known, other = (named.get(name, "nothing") for named in (model.alike, part.alike))
            if known != other:
                yield f"{path} has {name} {other}, {first} has {known}"
        if part.shard[1] != of:
            yield f"{path} has number of parts {part.shard[1]}, {first} has {of}"
    seen = Counter(part.shard[0] for part in parts.values() if part.shard[1] == of)
    for number in sorted(seen):
        if not 1 <= number <= of:
            yield f"part {number} of {of}, which is impossible"
        elif seen[number] > 1:
            twice = ", ".join(path for path, part in parts.items() if part.shard == (number, of))
            yield f"part {number} of {of} {seen[number]} times ({twice})"
    yield from _missing_parts(sorted(number for number in seen if 1 <= number <= of), of)


def _missing_parts(there: Sequence[int], of: int) -> Iterator[str]:
    for before, after in pairwise([0, *there, of + 1]):
        # A damaged report may claim a thousand million parts.
        if after - before - 1 > _MISSING_BY_NAME:
            yield f"parts {before + 1} to {after - 1} of {of} are missing"
        else:
            yield from (f"part {number} of {of} is missing" for number in range(before + 1, after))


class _Checks(tuple[str, ...]):
    """Names of checks, shown by their number and the first few."""

    __slots__ = ()

    def __str__(self) -> str:
        return f"{len(self)} ({', '.join(self[:3])}{', ...' if len(self) > 3 else ''})"


def _alike(report: RunReport) -> dict[str, object]:
    whole = {"implementations": report.implementations, "world sizes": report.world_sizes, "backend": report.backend}
    request = report.request or Request(())
    return {
        **whole,
        "tensor parallelism": report.tensor_parallel,
        "checks": _Checks(request.checks) if report.request is not None else "not recorded",
        "extended": request.extended,
        "expected failures": request.expectations or "none",
        "injected faults": report.environment.get("faults", "none"),
        **versions_of(report.environment),
        "commit": report.environment.get("commit", "none"),
    }


def _pairs(report: RunReport) -> list[tuple[str, str]]:
    """The pairs that the whole run had to judge, in order."""
    checks = report.request.checks if report.request is not None else ()
    return [(name, check) for name in report.implementations for check in checks]


def _strangers(path: str, part: RunReport) -> Iterator[str]:
    """Results that a part has twice, or that belong to another part."""
    number, of = part.shard
    own = _pairs(part)[number - 1 :: of]
    counted = Counter((result.implementation, result.check) for result in part.results)
    for (name, check), times in counted.items():
        if times > 1:
            yield f"{path} has {name} {check} {times} times"
        elif (name, check) not in own:
            yield f"{path} has {name} {check}, which is not of part {number} of {of}"


def _without_result(pair: tuple[str, str], path: str) -> CheckResult:
    name, check = pair
    return CheckResult(name, check, "", (), Verdict.UNKNOWN, f"{path} has no result of it")
