"""Is every exhibit caught? The checks that must catch it judge it, and the sound reference too."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

from fsdp_testing.cases.records import CheckResult, Verdict
from fsdp_testing.checks.conformance import run_check, shared_runner
from fsdp_testing.errors import InvalidArgument
from fsdp_testing.judging.case_runner import CaseRunner
from fsdp_testing.judging.concurrency import Shared
from fsdp_testing.museum.collection import PATHS, exhibits
from fsdp_testing.museum.exhibit import Exhibit
from fsdp_testing.museum.hunt import Hunt, hunt

Sound = Shared[CheckResult]
"""Results of the sound reference, by path, check and world sizes."""

SOUND_KEPT = 1024


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
        """Check that had to fail on the bug and did not."""
        return tuple(result.check for result in self.results if result.verdict is not Verdict.FAIL)

    @property
    def false_alarms(self) -> tuple[str, ...]:
        """Check that do not pass without the bug, so that their failure with it proves nothing."""
        return tuple(result.check for result in self.sound if result.verdict is not Verdict.PASS)

    @property
    def caught(self) -> bool:
        """Every check named fails on the bug and passes without it."""
        return not self.missed and not self.false_alarms


def chosen(ids: Iterable[str]) -> list[Exhibit]:
    """Return the exhibits named; all of them when none is.

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
    hunted: bool = False,
    seed: int = 0,
    sound: Sound | None = None,
    jobs: int = 1,
) -> Iterator[Visit]:
    """Visit each exhibit in turn.

    Args:
        selection: The exhibits.
        runner: Where cases run; by default the process's shared one.
        hunted: Hunt each exhibit with random cases too.
        seed: Of the random cases.
        sound: Results of the sound reference that are known already; it is judged once for each path, check and world
            size, and the result is added here.
        jobs: Exhibits judged at a time, each on worlds of its own; visits and their order are the same for any number.
            Hunts, which have several batches under way, go one after another.
    """
    judge = runner or shared_runner()
    known = Shared[CheckResult](SOUND_KEPT) if sound is None else sound
    tasks = [partial(_visit, judge, exhibit, known) for exhibit in selection]
    with closing(judge.side_by_side(tasks, jobs)) as visits:
        for visit in visits:
            met = hunt(visit.exhibit, seed) if hunted and visit.exhibit.fuzzed else None
            yield visit if met is None else replace(visit, hunt=met, seconds=visit.seconds + met.seconds)


def _visit(runner: CaseRunner, exhibit: Exhibit, known: Sound) -> Visit:
    """Judge the exhibit's checks, with the bug and without. The bug is known, so that no time is spent on its cause."""
    started = time.monotonic()

    def judged(name: str, check: str) -> CheckResult:
        return run_check(name, check, world_sizes=exhibit.world_sizes, runner=runner)

    results = tuple(judged(exhibit.target, check) for check in exhibit.checks)
    path = PATHS[exhibit.path]
    sound = tuple(
        known.get((path, check, exhibit.world_sizes), partial(judged, path, check)) for check in exhibit.checks
    )
    return Visit(exhibit, results, sound, None, time.monotonic() - started)
