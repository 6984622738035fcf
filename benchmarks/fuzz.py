"""How fast the fuzzer draws, runs and shrinks: medians over several campaigns, against the numbers promised.

    python benchmarks/fuzz.py [--seconds 20] [--repeats 3] [--json FILE] [NAME ...]
    python benchmarks/fuzz.py --bare [--cases 300] [--repeats 3] [--json FILE] [NAME ...]

Run it on an otherwise idle machine: a campaign keeps two cores busy, and whatever else runs is in the numbers. The load
average before each campaign is printed beside them, and two yardsticks before all, to compare machines by: what two ranks
take for a small all_reduce, and an interpreter for `import torch`.

With `--bare`: what each part of the fuzzer adds to the CPU time of the same cases run alone (`case_cost.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import case_cost

from fsdp_testing import run_ranks
from fsdp_testing.adapters import registry
from fsdp_testing.cases.drawing import CaseDrawer, Scope, SeededChoices
from fsdp_testing.checks.findings.discovery import Discovery
from fsdp_testing.checks.findings.known import shipped_known
from fsdp_testing.ranks.pool import Pool, default_pool
from fsdp_testing.search.campaign.campaign import Campaign, Plan

GOALS = {
    "torch-ddp": 120,
    "torch-fsdp1": 60,
    "torch-fsdp2": 40,
    "fsdp_ref-wrapper": 60,
    "fsdp_ref-composable": 60,
}
"""Cases per second at 2 ranks that are promised."""


def small_all_reduces(count: int) -> list[float]:
    """Seconds of each all_reduce of four numbers on this rank."""
    import torch
    import torch.distributed as dist

    value, seconds = torch.ones(4), []
    for _ in range(count):
        start = time.perf_counter()
        dist.all_reduce(value)
        seconds.append(time.perf_counter() - start)
    return seconds


def cold_import() -> float:
    """Seconds of `import torch` in a new interpreter."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - start


def yardsticks() -> dict[str, float]:
    """What this machine takes, by median, for two things that are none of the fuzzer's."""
    reduces = run_ranks(small_all_reduces, 2000, size=2)
    default_pool().close()
    return {
        "small_all_reduce_seconds": statistics.median(second for rank in reduces for second in rank[200:]),
        "import_torch_seconds": statistics.median(cold_import() for _ in range(5)),
    }


def drawing_rate(name: str, count: int = 3000) -> float:
    """Cases drawn per second by the seeded source."""
    drawer = CaseDrawer(Scope(registry.load(name).capabilities))
    drawer.draw(SeededChoices(0))
    start = time.perf_counter()
    for seed in range(count):
        drawer.draw(SeededChoices(seed))
    return count / (time.perf_counter() - start)


WARMING = 96


def campaign(name: str, seconds: float, seed: int) -> dict[str, Any]:
    """One campaign on ranks that are warm.

    `rate` leaves out what lanes spent on suspects: how many there are is the implementation's affair, not the fuzzer's.
    """
    shrunk: list[Discovery] = []
    with tempfile.TemporaryDirectory() as folder:
        adapter = registry.load(name)
        asked = Plan(adapter, Scope(adapter.capabilities), Path(folder), known=shipped_known(name))
        warming = replace(asked, state=Path(folder) / "warming", examples=WARMING, seconds=None, seed=seed + 1000)
        plan = replace(asked, state=Path(folder) / "measured", seconds=seconds, seed=seed)
        pool = Pool()
        try:
            Campaign(warming, pool, lambda _: None, lambda *_: None).run()
            run = Campaign(plan, pool, lambda _: None, lambda found, _: shrunk.append(found))
            load = os.getloadavg()[0]
            tally = run.run()
        finally:
            pool.close()
    shrinking = [found for found in shrunk if found.confirmed and found.attempts]
    searching = max(tally.seconds - tally.investigating_seconds / plan.lanes, 1e-9)
    return {
        "rate": tally.run / searching,
        "rate_with_suspects": tally.rate,
        "operations": tally.operations / max(tally.run, 1),
        "drawing_share": tally.drawing_seconds / max(tally.seconds, 1e-9),
        "load_before": load,
        "cases": tally.run,
        "findings": len(shrunk),
        "shrink_seconds": [found.seconds for found in shrinking],
        "shrink_attempts": [found.attempts for found in shrinking],
        "shrink_operations": [len(found.case.program) for found in shrinking],
        "worlds_lost": tally.worlds_lost,
    }


def report(name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of several runs."""
    seconds = [second for run in runs for second in run["shrink_seconds"]]
    operations = [number for run in runs for number in run["shrink_operations"]]
    attempts = [number for run in runs for number in run["shrink_attempts"]]
    return {
        "name": name,
        "goal": GOALS.get(name),
        "drawn_per_second": drawing_rate(name),
        **{
            key: statistics.median(run[key] for run in runs)
            for key in ("rate", "rate_with_suspects", "operations", "drawing_share", "load_before")
        },
        "best_rate": max(run["rate"] for run in runs),
        "shrink_median_seconds": statistics.median(seconds) if seconds else None,
        "shrink_median_operations": statistics.median(operations) if operations else None,
        "shrink_median_attempts": statistics.median(attempts) if attempts else None,
        "shrinks": len(seconds),
    }


def compare_with_bare(options: argparse.Namespace) -> int:
    """Prints what a case costs, part by part, for each implementation."""
    found = {}
    for name in options.names:
        found[name] = case_cost.measure(name, options.cases, options.repeats)
        sys.stdout.write(case_cost.table(name, found[name]) + "\n")
        sys.stdout.flush()
    if options.json:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


def main() -> int:
    """Prints one line for each implementation; exits with 1 if a promised rate is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(GOALS), metavar="NAME")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--bare", action="store_true", help="the cost of a case by part instead, beside its program alone"
    )
    parser.add_argument("--cases", type=int, default=300, help="with --bare: so many are drawn")
    options = parser.parse_args()
    if options.bare:
        return compare_with_bare(options)
    machine = yardsticks()
    sys.stdout.write(
        f"small all_reduce {machine['small_all_reduce_seconds'] * 1e6:.0f} us, "
        f"import torch {machine['import_torch_seconds']:.2f} s\n"
    )
    lines = []
    for name in options.names:
        runs = [campaign(name, options.seconds, seed) for seed in range(options.repeats)]
        lines.append(report(name, runs))
        one = lines[-1]
        shrink = (
            f"shrink {one['shrink_median_seconds']:.1f} s to {one['shrink_median_operations']:.0f} operations "
            f"in {one['shrink_median_attempts']:.0f} attempts ({one['shrinks']})"
            if one["shrinks"]
            else "nothing to shrink"
        )
        sys.stdout.write(
            f"{name:22} {one['rate']:6.1f} cases/s (best {one['best_rate']:.1f}, promised {one['goal'] or '-'}, "
            f"{one['rate_with_suspects']:.1f} with what suspects cost), "
            f"{one['operations']:.1f} operations, drawing {one['drawing_share']:.1%} of the time "
            f"({one['drawn_per_second']:.0f}/s alone), {shrink}, load {one['load_before']:.1f}\n"
        )
        sys.stdout.flush()
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "campaigns": lines}, indent=1), encoding="utf-8")
    return int(any(one["goal"] and one["rate"] < one["goal"] for one in lines))


if __name__ == "__main__":
    sys.exit(main())
