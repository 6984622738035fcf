"""The cost of one multi-rank test, here and with the launchers that others use.

Each setup is a generated test file, run by real pytest in a process of its own; the time of a test is what passes between
pytest's start and end of the item, its first test is kept apart. Setups take turns, so that a busy machine is busy for
all of them. Minima tell the cost, medians the cost under the load of the moment.

    python benchmarks/pool.py [--quick] [--json FILE] [--ranks 2,4] [--only NAME,...]
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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from figures import Comparison
from pool_setups import CLOCK, SETUPS, Setup


@dataclass(slots=True)
class Times:
    """Seconds of the first tests and of all others, over all rounds."""

    first: list[float] = field(default_factory=list)
    later: list[float] = field(default_factory=list)
    problem: str = ""


def run_setup(setup: Setup, ranks: int, tests: int, folder: Path) -> tuple[list[float], str]:
    """Seconds of each test of one pytest run, or the reason why there are none."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "conftest.py").write_text(CLOCK)
    (folder / "test_generated.py").write_text(setup.source(ranks, tests))
    output = folder / "times.json"
    output.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "BENCHMARK_TIMES": str(output),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(folder)]
    command += [] if setup.ours else ["-p", "no:fsdp_testing"]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=560, check=False
    )
    if not output.exists():
        return [], done.stdout[-1500:] + done.stderr[-1500:]
    expected = json.loads(output.read_text())
    if set(expected["outcomes"]) != {"passed"} or len(expected["times"]) != tests:
        return [], done.stdout[-3000:]
    return expected["times"], ""


def cold_import(rounds: int) -> list[float]:
    """Seconds of `import torch, torch.distributed` in a new interpreter."""
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torch, torch.distributed"], check=True)
        seconds.append(time.perf_counter() - start)
    return seconds


# ---- inside ranks


def ledger_cost(rounds: int, calls: int) -> dict[str, list[float]]:
    """Seconds per small all_reduce with the ledger and without, in turns."""
    import torch
    import torch.distributed as dist

    from fsdp_testing.ranks.ledger import interception

    value = torch.ones(4)
    seconds: dict[str, list[float]] = {"on": [], "off": []}
    recorder = interception._active
    # Neighbouring calls take turns: what else the machine does is the same for both. On every rank alike, or the one with
    # the ledger would make the one without it wait.
    for _ in range(rounds):
        for call in range(2 * calls):
            mode = "off" if call % 2 else "on"
            interception._active = recorder if mode == "on" else None
            start = time.perf_counter()
            dist.all_reduce(value)
            seconds[mode].append(time.perf_counter() - start)
        value.fill_(1)
    interception._active = recorder
    # The ledger saw one half of the calls on every rank: they agree.
    return seconds


def raises() -> None:
    import torch
    import torch.distributed as dist

    from fsdp_testing import current_world

    if current_world().rank == 1:
        raise ValueError("planted")
    dist.all_reduce(torch.ones(4))


def killed() -> None:
    import signal

    import torch
    import torch.distributed as dist

    from fsdp_testing import current_world

    if current_world().rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(4))


def returns_early() -> None:
    import torch
    import torch.distributed as dist

    from fsdp_testing import current_world

    if current_world().rank == 0:
        dist.all_reduce(torch.ones(4))


def disagrees() -> None:
    import torch
    import torch.distributed as dist

    from fsdp_testing import current_world

    dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX if current_world().rank else dist.ReduceOp.SUM)


def hangs() -> None:
    import torch
    import torch.distributed as dist

    from fsdp_testing import current_world

    while current_world().rank == 1:
        pass
    dist.all_reduce(torch.ones(4))


def nothing() -> None: ...


FATES = {
    "raises": raises,
    "SIGKILL": killed,
    "early return": returns_early,
    "other op": disagrees,
    "hangs (2 s)": hangs,
}


def fates(ranks: int, rounds: int) -> dict[str, list[float]]:
    """Seconds until each fate is reported, on a world that is warm."""
    from fsdp_testing.ranks.pool import default_pool

    seconds: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, function in FATES.items():
            world = default_pool().world(ranks)
            world.execute(nothing)
            start = time.perf_counter()
            outcome = world.execute(function, timeout=2.0 if "hangs" in name else 60.0)
            seconds.setdefault(name, []).append(time.perf_counter() - start)
            world.release()
            if outcome.ok:
                raise SystemExit(f"{name} was not noticed")
    return seconds


def hygiene_cost(calls: int) -> list[float]:
    """Seconds of the comparison that follows a job which left nothing behind."""
    from fsdp_testing.ranks.pool.hygiene import take_snapshot

    seconds = []
    for _ in range(calls):
        start = time.perf_counter()
        dirt = take_snapshot().restore()
        seconds.append(time.perf_counter() - start)
        assert not dirt, dirt
    return seconds


# ---- report


def summary(seconds: Iterable[float]) -> dict[str, float]:
    """Minimum, median and count, in milliseconds."""
    values = sorted(seconds)
    return {"min": values[0] * 1e3, "median": statistics.median(values) * 1e3, "count": len(values)}


def shown(expected: dict[str, float]) -> str:
    return f"{expected['min']:9.2f} / {expected['median']:9.2f}"


def print_report(report: dict[str, Any]) -> None:
    cold = report["cold import torch"]["min"]
    print(f"\ncold import of torch: {shown(report['cold import torch'])} ms (min / median)")
    for ranks, setups in report["setups"].items():
        base = setups.get("warm, marker") or setups.get("warm, run_ranks")
        print(f"\n{ranks} ranks: one test, ms (min / median), the minimum against the warm one, and the first test")
        for name, expected in setups.items():
            if "problem" in expected:
                print(f"  {name:40} did not run: {expected['problem'].strip().splitlines()[-1:]}")
                continue
            ratio = f"{expected['later']['min'] / base['later']['min']:8.1f}x" if base and "later" in base else ""
            first = f"{expected['first']['min']:8.0f} ms = {expected['first']['min'] / cold:4.2f} cold imports"
            print(f"  {name:40} {shown(expected['later'])} {ratio:>10}  first {first}")
    for ranks, expected in report["ledger"].items():
        share = (expected["on"]["min"] / expected["off"]["min"] - 1) * 100
        middle = (expected["on"]["median"] / expected["off"]["median"] - 1) * 100
        print(
            f"\nledger, all_reduce of 4 floats on {ranks} ranks: {expected['on']['min'] * 1e3:.1f} us with, "
            f"{expected['off']['min'] * 1e3:.1f} us without: +{share:.1f} % (medians +{middle:.1f} %)"
        )
    print(f"\nstate of a process compared before and after a clean job: {shown(report['hygiene'])} ms (min / median)")
    print("\ntime until a fate is reported, ms (min / median):")
    for name, expected in report["fates"].items():
        print(f"  {name:20} {shown(expected)}")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of few tests")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--ranks", default="2,4", help="world sizes, comma-separated")
    parser.add_argument("--only", default="", help="setups whose name holds one of these, comma-separated")
    return parser.parse_args()


def in_turns(
    setups: Sequence[Setup], sizes: Sequence[int], rounds: int, *, quick: bool
) -> dict[tuple[int, str], Times]:
    """Run each setup on each number of ranks, `rounds` times in turn, and return what its tests took."""
    times = {(size, setup.name): Times() for size in sizes for setup in setups}
    with tempfile.TemporaryDirectory(prefix="pool-benchmark-") as scratch:
        for _ in range(rounds):
            for size in sizes:
                for index, setup in enumerate(setups):
                    tests = setup.quick if quick else setup.tests
                    seconds, problem = run_setup(setup, size, tests, Path(scratch) / f"{size}-{index}")
                    expected = times[size, setup.name]
                    expected.problem = expected.problem or problem
                    expected.first += seconds[:1]
                    expected.later += seconds[1:]
                    print(f"{size} ranks, {setup.name}: {problem or shown(summary(seconds[1:]))}", file=sys.stderr)
    return times


CONTINUOUS = "MultiProcContinuousTest"
GOALS = {"": 0.9, "FSDP2 parity, ": 1.1}
"""Highest ratio to torch's own class that is promised for an empty test, and for one that trains."""


def comparisons(*, quick: bool) -> Iterator[Comparison]:
    """Measure warm tests beside those of torch's class that keeps its processes."""
    setups = [setup for setup in SETUPS if "warm" in setup.name or CONTINUOUS in setup.name]
    times = in_turns(setups, (2, 4), 2 if quick else 5, quick=quick)
    for size in (2, 4):
        for prefix, goal in GOALS.items():
            samples = {
                setup.name.removeprefix(prefix): [1000 * seconds for seconds in times[size, setup.name].later]
                for setup in setups
                if setup.name.startswith("FSDP2") == bool(prefix) and times[size, setup.name].later
            }
            kind = "a test of FSDP2 parity" if prefix else "an empty test"
            if CONTINUOUS in samples:
                goals = {name: goal for name in samples if name != CONTINUOUS}
                yield Comparison(f"{kind}, {size} ranks", "ms", samples, (CONTINUOUS,), goal=goals)


def measure(chosen: argparse.Namespace) -> dict[str, Any]:
    rounds = 1 if chosen.quick else 3
    wanted = [word for word in chosen.only.split(",") if word]
    setups = [setup for setup in SETUPS if not wanted or any(word in setup.name for word in wanted)]
    sizes = [int(size) for size in chosen.ranks.split(",")]
    cold = cold_import(2 * rounds)
    times = in_turns(setups, sizes, rounds, quick=chosen.quick)
    report: dict[str, Any] = {"cold import torch": summary(cold), "setups": {}, "ledger": {}}
    for (size, name), expected in times.items():
        entry = {"problem": expected.problem} if expected.problem else {
            "first": summary(expected.first), "later": summary(expected.later)
        }  # fmt: skip
        report["setups"].setdefault(size, {})[name] = entry
    return report


def measure_here(report: dict[str, Any], *, quick: bool) -> None:
    """Figures that need no pytest: the ledger, and the fates."""
    from fsdp_testing import run_ranks
    from fsdp_testing.ranks.pool import default_pool

    for ranks in (2, 4):
        results = run_ranks(ledger_cost, 4 if quick else 10, 300, size=ranks, timeout=300)
        report["ledger"][ranks] = {
            mode: summary(value for result in results for value in result[mode]) for mode in ("on", "off")
        }
    costs = run_ranks(hygiene_cost, 200, size=2, timeout=300)
    report["hygiene"] = summary(value for result in costs for value in result)
    report["fates"] = {name: summary(seconds) for name, seconds in fates(2, 1 if quick else 5).items()}
    default_pool().close()


def main() -> None:
    chosen = options()
    report = measure(chosen)
    measure_here(report, quick=chosen.quick)
    print_report(report)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
