"""The cost of `fsdp-verify train`, beside the script that it judges.

Two ratios, each of things that take turns, so that a busy machine is busy for both:

- the verdict: `fsdp-verify train` on several numbers of ranks, over the sum of the bare runs on these numbers (processes
  with torchrun's variables, without the time of torchrun itself);
- observing: the steps of the script in ranks that watch it as for a verdict, over the same ranks that only run it.

Reported are medians of the ratios, in processor seconds and in seconds of the clock; only the former mean something on a
busy machine.

    python benchmarks/train.py
    python benchmarks/train.py --repeats 1 --json out.json --script mine.py -- --its --arguments
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fsdp_testing import current_world, run_ranks
from fsdp_testing.train.on_rank import RunSettings, run_here
from fsdp_testing.train.script_job import ScriptJob, run_script
from fsdp_testing.train.surroundings import as_torchrun_starts

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "training" / "char_gpt.py"
Seconds = tuple[float, float]
"""Of the processors, and of the clock."""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def bare(command: list[str], size: int, folder: str) -> Seconds:
    """Run a script on `size` ranks as torchrun would start it."""
    port = str(free_port())
    common = {**os.environ, "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    before, begin = os.times(), time.perf_counter()
    ranks = [
        subprocess.Popen(
            [sys.executable, *command],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=folder,
            stdout=subprocess.DEVNULL,
        )
        for rank in range(size)
    ]
    if any(rank.wait() for rank in ranks):
        sys.exit(f"the script fails on {size} ranks")
    return _passed(before, begin)


def verdict(command: list[str], sizes: list[int], steps: int, folder: str) -> Seconds:
    """Let `fsdp-verify train` judge the script."""
    before, begin = os.times(), time.perf_counter()
    options = ["--world-sizes", ",".join(map(str, sizes)), "--steps", str(steps)]
    train = [sys.executable, "-m", "fsdp_testing.cli", "train", *options, *command]
    result = subprocess.run(train, cwd=folder, capture_output=True, text=True, check=False)
    if result.returncode:
        sys.exit(f"expected a pass, got exit code {result.returncode}:\n{result.stdout}{result.stderr}")
    return _passed(before, begin)


def _passed(before: os.times_result, begin: float) -> Seconds:
    now = os.times()
    return sum(now[:4]) - sum(before[:4]), time.perf_counter() - begin


def script_in_rank(job: ScriptJob, run: RunSettings, *, observed: bool) -> Seconds:
    """Run the script in this rank and return how long it took."""
    clock, begin = time.process_time(), time.perf_counter()
    if observed:
        run_here(job, run)
    else:
        with as_torchrun_starts(current_world()):
            run_script(job)
    return time.process_time() - clock, time.perf_counter() - begin


def watched(command: list[str], size: int, steps: int, folder: str, *, observed: bool) -> Seconds:
    """Return the processor seconds of all ranks, and the clock of the slowest one."""
    job, run = ScriptJob(command[0], tuple(command[1:])), RunSettings(steps=steps, folder=folder, keep_data=True)
    ranks = run_ranks(script_in_rank, job, run, size=size, isolation="fresh", timeout=600.0, observed=observed)
    return sum(one[0] for one in ranks), max(one[1] for one in ranks)


def ratios(one: list[Seconds], other: list[Seconds]) -> dict[str, float]:
    """Return the medians of the ratios of runs that took turns."""
    pairs = list(zip(one, other))
    return {
        "processors": statistics.median(a[0] / b[0] for a, b in pairs),
        "clock": statistics.median(a[1] / b[1] for a, b in pairs),
        "seconds": statistics.median(a[0] for a, _ in pairs),
        "bare seconds": statistics.median(b[0] for _, b in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps; the script makes as many (default: 20)")
    parser.add_argument("--world-sizes", default="1,2,3")
    parser.add_argument("--script", type=Path, default=SCRIPT)
    parser.add_argument("--json", type=Path)
    parser.add_argument("arguments", nargs="*", help="of the script")
    chosen = parser.parse_args()
    command = [str(chosen.script.resolve()), *chosen.arguments]
    sizes = [int(size) for size in chosen.world_sizes.split(",")]
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        judged, sums = [], []
        for _ in range(chosen.repeats):
            judged.append(verdict(command, sizes, chosen.steps, folder))
            runs = [bare(command, size, folder) for size in sizes]
            sums.append((sum(run[0] for run in runs), sum(run[1] for run in runs)))
        found["verdict over the sum of bare runs"] = ratios(judged, sums)
        for size in sizes:
            pairs = [
                [watched(command, size, chosen.steps, folder, observed=observed) for observed in (True, False)]
                for _ in range(chosen.repeats)
            ]
            found[f"observing on {size} ranks"] = ratios([one for one, _ in pairs], [other for _, other in pairs])
    for name, numbers in found.items():
        print(f"{name}: " + ", ".join(f"{what} {number:.2f}" for what, number in numbers.items()))
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
