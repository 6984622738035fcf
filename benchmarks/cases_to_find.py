"""Random cases and CPU time until the fuzzer meets a bug of the museum, beside plain Hypothesis.

    python benchmarks/cases_to_find.py [--exhibits B036,B147] [--seeds 10] [--limit 500] [--json FILE]

Both draw from the same strategies and meet the same bugs: a failing case that is no known failure and that the sound
reference passes. The fuzzer runs cases in batches and shrinks what it meets; Hypothesis runs one case after the other and
stops at the first, without shrinking. CPU seconds are those of all processes, ranks and their start included, so that
other work on the machine is not in them. A hunt that meets nothing within the limit counts as infinitely long.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from hypothesis import HealthCheck, Phase, given, seed, settings

from fsdp_testing.adapters import registry
from fsdp_testing.cases import drawing as strategies
from fsdp_testing.cases.records import Case, Verdict
from fsdp_testing.checks.findings.known import shipped_known
from fsdp_testing.judging.case_runner import CaseRunner
from fsdp_testing.judging.signature import signature_of
from fsdp_testing.ranks.pool import Pool

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "quality" / "broken"))

from hunting import RANDOM_CASES, hunt
from proving import BUGS, FAULTS, unbroken


class Hunted(NamedTuple):
    """What one hunt took: random cases (infinite if the bug was not met), CPU seconds of all processes."""

    cases: float
    cpu: float


class _Met(Exception):
    """The bug was met: Hypothesis stops at an exception."""


def by_fuzzer(name: str, number: int, limit: int, pool: Pool) -> float:
    """Return the cases until a campaign with this seed meets the bug."""
    met = hunt(name, number, limit=limit, pool=pool).cases
    return math.inf if met is None else met


def by_hypothesis(name: str, number: int, limit: int, pool: Pool) -> float:
    """Return the cases until Hypothesis with this seed meets the bug."""
    planted, runner = registry.adapter_of(name), CaseRunner(pool)
    known = shipped_known(planted.built_on)
    sizes = tuple(dict.fromkeys((*FAULTS[name].world_sizes, 2)))
    run, met = 0, None

    def is_met(case: Case) -> bool:
        judged = runner.judge(planted, case)
        if judged.finding is None or known.recognize(signature_of(judged.finding), case) is not None:
            return False
        return runner.judge(unbroken(FAULTS[name]), case).outcome.verdict is Verdict.PASS

    @seed(number)
    @settings(
        max_examples=limit,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(case=strategies.cases(capabilities=planted.capabilities, world_sizes=sizes))
    def search(case: Case) -> None:
        nonlocal run, met
        if met is None:
            run += 1
            met = case if is_met(case) else None
        # Hypothesis asks for the case that failed once more.
        if case == met:
            raise _Met

    try:
        search()
    except _Met:
        return run
    return math.inf


WAYS: dict[str, Callable[[str, int, int, Pool], float]] = {"fuzzer": by_fuzzer, "Hypothesis": by_hypothesis}


def measured(way: str, name: str, number: int, limit: int) -> Hunted:
    """Hunt with ranks of its own, which have ended when the time is read."""
    before, pool = _cpu(), Pool()
    try:
        cases = WAYS[way](name, number, limit, pool)
    finally:
        pool.close()
    return Hunted(cases, _cpu() - before)


def _cpu() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def main() -> None:
    """Hunt and print a line for each bug, then the medians over all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exhibits", help="ids, separated by commas; default: all that random cases can show")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--limit", type=int, default=RANDOM_CASES, help="cases of one hunt at most")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    names = options.exhibits.split(",") if options.exhibits else [n for n, name in BUGS.items() if FAULTS[name].fuzzed]
    unknown = sorted(set(names) - set(BUGS))
    if unknown:
        parser.error(f"--exhibits: expected ids of the museum, got {', '.join(unknown)}. See `fsdp-verify museum`.")
    table: dict[str, dict[str, list[Hunted]]] = {}
    for name in names:
        table[name] = {way: [measured(way, BUGS[name], n, options.limit) for n in range(options.seeds)] for way in WAYS}
        print(f"{name}: " + "; ".join(f"{way} {_line(found)}" for way, found in table[name].items()), flush=True)
    for way in WAYS:
        print(f"all, {way}: {_line([hunted for rows in table.values() for hunted in rows[way]])}")
    if options.json is not None:
        # JSON knows no infinity: what was not met has null.
        plain = {
            name: {way: [(None if math.isinf(cases) else cases, cpu) for cases, cpu in rows[way]] for way in rows}
            for name, rows in table.items()
        }
        options.json.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")


def _line(found: list[Hunted]) -> str:
    cases, cpu = (statistics.median(column) for column in zip(*found))
    missed = sum(math.isinf(one.cases) for one in found)
    return f"{cases:g} cases, {cpu:.1f} CPU s (medians of {len(found)}{f', {missed} not met' if missed else ''})"


if __name__ == "__main__":
    main()
