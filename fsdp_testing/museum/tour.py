"""Is every exhibit caught? The checks that must catch it judge it, and the sound reference too."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from fsdp_testing.conformance import run_conformance
from fsdp_testing.errors import InvalidArgument
from fsdp_testing.museum.collection import PATHS, exhibits
from fsdp_testing.museum.exhibit import Exhibit
from fsdp_testing.museum.hunt import RANDOM_CASES, Hunt
from fsdp_testing.programs.runner import CaseRunner
from fsdp_testing.records import CheckResult, Verdict

#: `(exhibit, seed, limit of random cases) -> what became of the hunt`.
Hunter = Callable[[Exhibit, int, int], Hunt]


@dataclass(frozen=True, slots=True)
class Visit:
    """What became of one exhibit.

    Attributes:
        exhibit: It.
        results: Results of its checks on the reference with the bug.
        sound: Results of the same checks on the reference without it.
        hunt: What the fuzzer made of it; None when it was not asked, or no random case can show the bug.
        seconds: For the whole visit.
    """

    exhibit: Exhibit
    results: tuple[CheckResult, ...]
    sound: tuple[CheckResult, ...]
    hunt: Hunt | None
    seconds: float

    @property
    def missed(self) -> tuple[str, ...]:
        """Checks that had to fail on the bug and did not."""
        return tuple(result.check for result in self.results if result.verdict is not Verdict.FAIL)

    @property
    def false_alarms(self) -> tuple[str, ...]:
        """Checks that do not pass without the bug, so that their failure with it proves nothing."""
        return tuple(result.check for result in self.sound if result.verdict is not Verdict.PASS)

    @property
    def caught(self) -> bool:
        """Every check named fails on the bug and passes without it."""
        return not self.missed and not self.false_alarms


def chosen(ids: Iterable[str]) -> list[Exhibit]:
    """The exhibits named; all of them when none is.

    Raises:
        InvalidArgument: an id that is not in the collection; every one is listed.
    """
    known = exhibits()
    wanted = list(ids)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise InvalidArgument(f"museum: expected ids among {', '.join(known)}, got {unknown}. Choose from the list.")
    return [known[name] for name in wanted] if wanted else list(known.values())


def tour(
    selection: Iterable[Exhibit],
    *,
    runner: CaseRunner | None = None,
    hunter: Hunter | None = None,
    seed: int = 0,
) -> Iterator[Visit]:
    """Visit each exhibit in turn; the sound reference is judged once per check and world size."""
    judge = runner or CaseRunner()
    sound: dict[tuple[str, str, tuple[int, ...]], CheckResult] = {}
    for exhibit in selection:
        started = time.monotonic()
        results = _judge(judge, exhibit.target, exhibit)
        keys = [(PATHS[exhibit.path], check, exhibit.world_sizes) for check in exhibit.checks]
        if any(key not in sound for key in keys):
            for result in _judge(judge, PATHS[exhibit.path], exhibit):
                sound[PATHS[exhibit.path], result.check, exhibit.world_sizes] = result
        met = hunter(exhibit, seed, RANDOM_CASES) if hunter is not None and exhibit.fuzzed else None
        yield Visit(exhibit, results, tuple(sound[key] for key in keys), met, time.monotonic() - started)


def _judge(runner: CaseRunner, name: str, exhibit: Exhibit) -> tuple[CheckResult, ...]:
    report = run_conformance(name, world_sizes=exhibit.world_sizes, checks=exhibit.checks, runner=runner)
    return report.results
