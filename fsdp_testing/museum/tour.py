"""Is every exhibit caught? The checks that must catch it judge it, and the sound reference too."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, MutableMapping
from dataclasses import dataclass

from fsdp_testing.conformance import run_conformance, shared_runner
from fsdp_testing.errors import InvalidArgument
from fsdp_testing.judging.case_runner import CaseRunner
from fsdp_testing.museum.collection import PATHS, exhibits
from fsdp_testing.museum.exhibit import Exhibit
from fsdp_testing.museum.hunt import Hunt, hunt
from fsdp_testing.records import CheckResult, Verdict

#: Results of the sound reference, by path, check and world sizes.
Sound = MutableMapping[tuple[str, str, tuple[int, ...]], CheckResult]


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
) -> Iterator[Visit]:
    """Visit each exhibit in turn.

    Args:
        selection: The exhibits.
        runner: Where cases run; by default the process's shared one.
        hunted: Hunt each exhibit with random cases too.
        seed: Of the random cases.
        sound: Results of the sound reference that are known already; it is judged once for each path, check and world
            size, and the result is added here.
    """
    judge = runner or shared_runner()
    known: Sound = {} if sound is None else sound
    for exhibit in selection:
        started = time.monotonic()
        results = _judge(judge, exhibit.target, exhibit, exhibit.checks)
        keys = {check: (PATHS[exhibit.path], check, exhibit.world_sizes) for check in exhibit.checks}
        unknown = tuple(check for check, key in keys.items() if key not in known)
        for result in _judge(judge, PATHS[exhibit.path], exhibit, unknown) if unknown else ():
            known[keys[result.check]] = result
        met = hunt(exhibit, seed) if hunted and exhibit.fuzzed else None
        yield Visit(exhibit, results, tuple(known[key] for key in keys.values()), met, time.monotonic() - started)


def _judge(runner: CaseRunner, name: str, exhibit: Exhibit, checks: tuple[str, ...]) -> tuple[CheckResult, ...]:
    # The bug is known and shown by its story, so that no time is spent on finding its cause.
    report = run_conformance(name, world_sizes=exhibit.world_sizes, checks=checks, runner=runner, explain=0.0)
    return report.results
