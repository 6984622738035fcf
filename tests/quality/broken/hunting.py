"""Counts random cases until the fuzzer meets a planted fault, and confirms that what it met is that fault."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from every_fault import FAULTS
from proving import BUGS, unbroken

from fsdp_testing.adapters import registry
from fsdp_testing.cases.drawing import Scope
from fsdp_testing.cases.records import Case, Verdict
from fsdp_testing.checks.findings.discovery import Discovery
from fsdp_testing.checks.findings.known import shipped_known
from fsdp_testing.errors import InvalidArgument
from fsdp_testing.judging.batch import Watch
from fsdp_testing.judging.case_runner import CaseRunner
from fsdp_testing.judging.known import KnownFailures, Rule, joined
from fsdp_testing.ranks.pool import Pool, default_pool
from fsdp_testing.search.campaign.campaign import Campaign, Plan

RANDOM_CASES = 500
"""Within so many random cases a fault must be met."""

_SHRINK_SECONDS = 5.0
_NO_LEAKS = KnownFailures((Rule("models that stay in memory", "not what is hunted", signatures=(("leaked",),)),))


@dataclass(frozen=True, slots=True)
class Hunt:
    """What became of one hunt.

    Attributes:
        cases: Random cases run until it was met, its batch included; None if it was not.
        run: Random cases run in all.
        seconds: Wall time, confirming and shrinking included.
        sentence: What was met, or why that does not count.
        case: The simplest case that shows it; None if it was not met.
    """

    cases: int | None
    run: int
    seconds: float
    sentence: str = ""
    case: Case | None = None


def drawn_bugs(count: int, seed: int) -> list[str]:
    """Choose `count` bugs of the field at random, equally for equal seeds, out of those that random cases can show.

    Raises:
        InvalidArgument: There are not so many.
    """
    able = [name for name in BUGS.values() if FAULTS[name].fuzzed]
    if not 1 <= count <= len(able):
        raise InvalidArgument(
            f"exhibits: expected 1 to {len(able)} of them, got {count}. So many can be met by random cases."
        )
    return random.Random(seed).sample(able, count)


def hunt(
    name: str, seed: int, *, limit: int = RANDOM_CASES, seconds: float | None = None, pool: Pool | None = None
) -> Hunt:
    """Run random cases on the implementation with the fault until one fails that passes without it.

    Args:
        name: The fault's.
        seed: From which all choices follow.
        limit: Random cases at most.
        seconds: Time at most; None for no limit.
        pool: Where worlds come from; the process's own by default.
    """
    fault = FAULTS[name]
    worlds = pool or default_pool()
    started = time.monotonic()
    planted = registry.adapter_of(name)
    scope = Scope(planted.capabilities, tuple(dict.fromkeys((*fault.world_sizes, 2))))
    known = joined([shipped_known(planted.built_on), _NO_LEAKS])
    run, text = 0, ""
    own: list[Discovery] = []
    with tempfile.TemporaryDirectory(prefix="fsdp-hunt-") as folder:
        plan = Plan(planted, scope, Path(folder), seed=seed, shrink_seconds=_SHRINK_SECONDS, stop_at_first=True)
        while not own and run < limit and (seconds is None or time.monotonic() - started < seconds):
            left = None if seconds is None else seconds - (time.monotonic() - started)
            # It ends with its first finding; the next one in the same folder goes on where it ended.
            asked = replace(plan, seconds=left, examples=limit - run, known=known)
            tally = Campaign(asked, worlds, lambda _: None, lambda *_: None).run()
            run += tally.run
            met = [found for found in tally.discovered if found.confirmed]
            own = own_bugs(met, unbroken(fault), worlds)
            if not own and (not met or not tally.run):
                break
            # What the sound implementation fails too is not hunted: the hunt goes on past it.
            text = "; ".join(f"the sound implementation fails this too: {found.sentence()}" for found in met)
            for found in met:
                known = known.with_rule(found.rule())
    return Hunt(
        min(run, limit) if own else None,
        run,
        time.monotonic() - started,
        own[0].sentence() if own else text,
        own[0].case if own else None,
    )


def own_bugs(met: Iterable[Discovery], sound: str, worlds: Pool) -> list[Discovery]:
    """Return those whose case implementation `sound`, which has no bug planted, passes."""
    runner, watch = CaseRunner(worlds, timeout=30.0), Watch(operations=True)
    return [found for found in met if runner.judge_batch(sound, [found.case], watch)[0].verdict is Verdict.PASS]
