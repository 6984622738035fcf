"""How do the reports of the parts of one run become the report of that run? Each part once, in the order of one run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest

from fsdp_testing.errors import InvalidArgument
from fsdp_testing.records import CheckResult, RunReport

# So many parts in a row are named one by one.
_MISSING_BY_NAME = 3
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
    refuse_parts(
        {path: Part(report.shard, _alike(report)) for path, report in reports.items()},
        "Give the JSON reports of `fsdp-verify run ... --shard 1/N` to `N/N`, all else alike.",
    )
    parts = sorted(reports.values(), key=lambda report: report.shard)
    rounds = zip_longest(*(part.results for part in parts))
    results = tuple(result for each in rounds for result in each if result is not None)
    _refuse(_gaps(parts, results), _ANOTHER_RUN)
    portraits = next((part.portraits for part in parts if part.portraits), ())
    seconds = sum(part.seconds for part in parts)
    return replace(parts[0], results=results, shard=(), portraits=portraits, seconds=seconds)


@dataclass(frozen=True, slots=True)
class Part:
    """What shows whether parts belong together: which one it is, `(i, n)` or empty, and what all have alike, by name."""

    shard: tuple[int, ...]
    alike: Mapping[str, object]


def refuse_parts(parts: Mapping[str, Part], advice: str) -> None:
    """Make sure that parts, by where they come from, are those of one whole.

    Raises:
        InvalidArgument: One is missing or there twice, or they are not of one whole; every offender is listed.
    """
    _refuse(_problems(parts), advice)


def versions_of(environment: Mapping[str, str]) -> dict[str, object]:
    """Return the versions that all parts have alike, by name."""
    return {name: environment.get(name, "") for name in _ALIKE_ENVIRONMENT}


def _refuse(problems: Iterable[str], advice: str) -> None:
    if listed := "; ".join(problems):
        raise InvalidArgument(f"merge: expected every part of one run once, got: {listed}. {advice}")


def _problems(given: Mapping[str, Part]) -> Iterator[str]:
    for path, part in given.items():
        if len(part.shard) != 2:
            yield f"{path} is no part but a whole run"
    parts = {path: part for path, part in given.items() if len(part.shard) == 2}
    if not parts:
        if not given:
            yield "no report"
        return
    first, model = next(iter(parts.items()))
    of = model.shard[1]
    for path, part in parts.items():
        for name, known in {**model.alike, "number of parts": of}.items():
            other = {**part.alike, "number of parts": part.shard[1]}[name]
            if known != other:
                yield f"{path} has {name} {other}, {first} has {known}"
    seen = Counter(part.shard[0] for part in parts.values() if part.shard[1] == of)
    for number in sorted(seen):
        if not 1 <= number <= of:
            yield f"part {number} of {of}, which cannot be"
        elif seen[number] > 1:
            twice = ", ".join(path for path, part in parts.items() if part.shard == (number, of))
            yield f"part {number} of {of} {seen[number]} times ({twice})"
    yield from _missing(sorted(number for number in seen if 1 <= number <= of), of)


def _missing(there: Sequence[int], of: int) -> Iterator[str]:
    for before, after in pairwise([0, *there, of + 1]):
        # A damaged report may say that there are a thousand million.
        if after - before - 1 > _MISSING_BY_NAME:
            yield f"parts {before + 1} to {after - 1} of {of} are missing"
        else:
            yield from (f"part {number} of {of} is missing" for number in range(before + 1, after))


_ANOTHER_RUN = "Give the reports of one run, all of one version."


def _alike(report: RunReport) -> dict[str, object]:
    whole = {"implementations": report.implementations, "world sizes": report.world_sizes, "backend": report.backend}
    return {**whole, "tensor parallelism": report.tensor_parallel, **versions_of(report.environment)}


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
