"""A night of faults, hostile files, warm tests, bursts of pytest and slow ranks, each with its verdict.

    python benchmarks/soak.py [--minutes M | --faults N --warm N --hostile N --bursts N --slowed N] [--seed S] [--only PART,...]
                              [--state FILE] [--json FILE]

Everything follows from the seed; `--state` lets a run go on where the last one ended. With `--minutes` the parts take turns
until the time is up and each has had one, whatever the counts. Exit code 1 if one verdict was wrong, something came late, or
something was left.

- faults: a rank raises, dies, hangs, disagrees, returns early or leaks state. The verdict and the blamed rank are
  right, no later than the deadline and 2 s; the test after it is healthy; no process, descriptor, thread or file is left.
- hostile: a damaged file at each door that reads one ends in one sentence, with a documented exit code (soak_hostile.py).
- warm: tests on the same ranks, in one pytest; ranks do not grow by more than 1 %.
- bursts: several pytest processes at a time; each counts right, and leaves nothing.
- slowed: one rank is stopped and told to go on, again and again, or naps before each collective; the test passes.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import soak_damage
import soak_faults
import soak_hostile

from fsdp_testing.ranks.pool import Pool, default_pool

COUNTS = {"faults": 60, "hostile": 600, "warm": 500, "bursts": 2, "slowed": 10}
AT_A_TIME = {"faults": 10, "hostile": 200, "warm": 500, "bursts": 1, "slowed": 5}
BURST = 8
GROWTH = 0.01
SETTLED = 0.3
"""Of the warm tests so many come first: caches fill, and torch's record of the last collectives."""


@dataclass
class Part:
    """How far one part is, and what went wrong in it."""

    done: int = 0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    kinds: dict[str, int] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)

    def take(self, kind: str, number: int, complaint: str) -> None:
        self.done = number + 1
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        if complaint:
            self.wrong.append(f"{number}: {kind}: {complaint}")
            print(f"\nWRONG {self.wrong[-1]}", file=sys.stderr)


@dataclass
class Soak:
    """All parts of one run, and where they work."""

    seed: int
    folder: Path
    pool: Pool
    doors: list[soak_hostile.Door] = field(default_factory=list)

    def rng(self, part: str, number: int) -> random.Random:
        return random.Random(f"{self.seed} {part} {number}")

    def faults(self, part: Part, numbers: range) -> None:
        before = _settled(self.pool)
        for number in numbers:
            fault = soak_faults.drawn(self.rng("fault", number))
            try:
                complaint = soak_faults.wrong(self.pool, fault)
            except Exception as error:  # noqa: BLE001 - it is ours: no fault of a rank may end its controller
                complaint = f"{fault}: the controller raised {soak_faults.raised(error)}"
            part.take(f"{fault.sort}: {fault.name}", number, complaint)
        after, lost = _settled(self.pool), soak_faults.orphans(self.pool)
        part.figures = {"before": before, "after": after}
        for name in ("descriptors", "threads", "shared memory"):
            if after[name] > before[name]:
                part.wrong.append(f"{numbers}: {name} of the controller: {before[name]} before, {after[name]} after")
        part.wrong += [f"{numbers}: left running: {text}" for text in lost]

    def hostile(self, part: Part, numbers: range) -> None:
        if not self.doors:
            self.doors = soak_hostile.doors(self.folder / "sound")
            ended = [(door.name, soak_hostile.refused(door, self.folder / "hostile")) for door in self.doors]
            part.wrong += [f"{numbers}: {name}: {complaint}" for name, complaint in ended if complaint]
        for number in numbers:
            door = self.doors[number % len(self.doors)]
            data = soak_damage.hostile(self.rng("hostile", number), door.sound, door.form)
            part.take(door.name, number, soak_hostile.wrong(door, data, self.folder / "hostile"))

    def warm(self, part: Part, numbers: range) -> None:
        folder = self.folder / "warm"
        folder.mkdir(exist_ok=True)
        (folder / "test_warm.py").write_text(WARM.replace("COUNT", str(len(numbers))))
        (folder / "held.txt").unlink(missing_ok=True)
        before = soak_faults.left_in_shared_memory()
        ended = _pytest(folder)
        complaint = "" if f"{len(numbers)} passed" in ended else ended[-300:]
        if left := soak_faults.left_in_shared_memory() - before:
            complaint += f"left in shared memory: {', '.join(sorted(left))}; "
        lines = [line.split() for line in (folder / "held.txt").read_text().splitlines()] if not complaint else []
        for who in sorted({line[0] for line in lines}):
            own = [dict(zip(("KiB", "descriptors", "threads"), map(int, line[2:]))) for line in lines if line[0] == who]
            first, last = own[int(len(own) * SETTLED)], own[-1]
            part.figures[who] = {"tests": len(numbers), "after a third": first, "at the end": last}
            worse = [name for name in ("descriptors", "threads") if last[name] > first[name]]
            worse += ["memory"] if last["KiB"] > first["KiB"] * (1 + GROWTH) else []
            complaint += f"{who}: more {', '.join(worse)}: {first} and then {last}; " if worse else ""
        part.take("one pytest", numbers[-1], complaint)

    def bursts(self, part: Part, numbers: range) -> None:
        folder = self.folder / "burst"
        folder.mkdir(exist_ok=True)
        (folder / "test_burst.py").write_text(BURSTS)
        for number in numbers:
            texts: list[str] = []
            threads = [threading.Thread(target=lambda to=texts: to.append(_pytest(folder))) for _ in range(BURST)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            lost = [f"{BURST - len(texts)} did not end"] if len(texts) < BURST else []
            odd = lost + [text[-300:] for text in texts if not re.search(r"\b2 failed, 3 passed\b", text)]
            part.take(f"{BURST} processes of pytest", number, "; ".join([*odd, *soak_faults.orphans(self.pool)]))

    def slowed(self, part: Part, numbers: range) -> None:
        for number in numbers:
            rng = self.rng("slowed", number)
            size, stopped = rng.choice((2, 3)), rng.random() < 0.5
            culprit = rng.randrange(size)
            naps = [0.0 if stopped else rng.random() * 0.05 for _ in range(500 if stopped else 20)]
            with self.pool.lend(size) as world, Stopping(world.pids[culprit], rng, stopped=stopped):
                outcome = world.execute(soak_faults.slow, (culprit, naps), timeout=60.0)
            good = outcome.ok and outcome.values == [float(len(naps))] * size
            part.take("stopped" if stopped else "naps", number, "" if good else outcome.cause or f"{outcome.values}")


class Stopping:
    """Stop a process and let it go on, at random moments, as long as the block lasts."""

    def __init__(self, pid: int, rng: random.Random, *, stopped: bool) -> None:
        self._pid, self._rng, self._ended = pid, rng, threading.Event()
        self._thread = threading.Thread(target=self._work) if stopped else None

    def _work(self) -> None:
        while not self._ended.wait(self._rng.random() * 0.02):
            os.kill(self._pid, signal.SIGSTOP)
            self._ended.wait(self._rng.random() * 0.05)
            os.kill(self._pid, signal.SIGCONT)

    def __enter__(self) -> None:
        if self._thread is not None:
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()


WARM = """
import os, pathlib, pytest, torch
import torch.distributed as dist

def note(who, number):
    status = pathlib.Path("/proc/self/status").read_text()
    held = [int(status.partition("VmRSS:")[2].split()[0]), *(len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task"))]
    with open(pathlib.Path(__file__).with_name("held.txt"), "a") as file:
        file.write(" ".join(map(str, (who, number, *held))) + "\\n")

@pytest.mark.world(2)
@pytest.mark.parametrize("number", range(COUNT))
def test_sum(world, number):
    value = torch.ones(4)
    dist.all_reduce(value)
    assert value.tolist() == [2.0] * 4
    if number % max(1, COUNT // 50) == 0 or number == COUNT - 1:
        note(f"rank{world.rank}", number)
"""
BURSTS = """
import os, signal, pytest, torch
import torch.distributed as dist

@pytest.mark.world([2, 3])
def test_sum(world):
    value = torch.ones(4)
    dist.all_reduce(value)
    assert value.tolist() == [float(world.size)] * 4

@pytest.mark.world(2)
def test_differs(world):
    assert world.rank == 0

@pytest.mark.world(2)
def test_dies(world):
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()

@pytest.mark.world(2)
def test_after(world):
    dist.barrier()
"""


def _pytest(folder: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", str(folder)]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=7200, check=False
    )
    return done.stdout + done.stderr


def _settled(pool: Pool) -> dict[str, int]:
    """Return what this process holds besides worlds: those are ended first."""
    for world in pool.worlds():
        world.discard()
    return soak_faults.held()


# ------------------------------------------------------------------------------------------------ the run


def run(
    soak: Soak, parts: dict[str, Part], wanted: dict[str, int], minutes: float | None, keep: Callable[[], None]
) -> None:
    """Let the parts take turns until each has its count, or the time is up and each has had its turn."""
    limit = time.monotonic() + 60 * minutes if minutes else None
    while True:
        open_parts = [name for name, part in parts.items() if limit is not None or part.done < wanted[name]]
        if not open_parts:
            return
        for name in open_parts:
            part = parts[name]
            count = AT_A_TIME[name]
            if limit is None:
                # Growth shows in one session, however long.
                count = wanted[name] - part.done if name == "warm" else min(count, wanted[name] - part.done)
            start = time.monotonic()
            getattr(soak, name)(part, range(part.done, part.done + count))
            part.seconds += time.monotonic() - start
            keep()
            text = "  ".join(
                f"{name} {part.done}" + (f" ({len(part.wrong)} wrong)" if part.wrong else "")
                for name, part in parts.items()
            )
            print(f"\r{text}", end="", file=sys.stderr, flush=True)
            if limit is not None and time.monotonic() > limit and all(part.done for part in parts.values()):
                return


def seed(text: str) -> int:
    return datetime.now(UTC).date().toordinal() if text == "today" else int(text)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="end after so many, whatever the counts")
    for name, count in COUNTS.items():
        parser.add_argument(f"--{name}", type=int, default=count, metavar="N", help=f"default {count}")
    parser.add_argument("--seed", type=seed, default=0, metavar="S", help="a number, or `today`: another one each day")
    parser.add_argument("--only", default="", metavar="PART,...", help=f"of {', '.join(COUNTS)}")
    parser.add_argument("--state", type=Path, metavar="FILE", help="how far it is; a run goes on from there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    return parser.parse_args()


def report(chosen: argparse.Namespace, parts: dict[str, Part]) -> dict[str, Any]:
    versions = {name: importlib.metadata.version(name) for name in ("fsdp-testing", "torch", "pytest")}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {**versions, "python": platform.python_version()},
        "load": os.getloadavg(),
        "seed": chosen.seed,
        "parts": {name: vars(part) for name, part in parts.items()},
    }  # fmt: skip


def main() -> int:
    chosen = options()
    names = [name for name in chosen.only.split(",") if name] or list(COUNTS)
    if unknown := sorted(set(names) - set(COUNTS)):
        raise SystemExit(f"--only: expected parts among {', '.join(COUNTS)}, got {', '.join(unknown)}.")
    parts = {name: Part() for name in names}
    if chosen.state is not None and chosen.state.exists():
        known = json.loads(chosen.state.read_text())
        if known["seed"] != chosen.seed:
            raise SystemExit(
                f"--state: expected seed {chosen.seed}, got one of seed {known['seed']}. Give another file."
            )
        parts |= {name: Part(**known["parts"][name]) for name in names if name in known["parts"]}

    def keep() -> None:
        if chosen.state is not None:
            beside = chosen.state.with_suffix(".partial")
            beside.write_text(json.dumps(report(chosen, parts)))
            beside.replace(chosen.state)

    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        soak = Soak(chosen.seed, Path(folder), default_pool())
        soak.pool.start()
        run(soak, parts, {name: getattr(chosen, name) for name in names}, chosen.minutes, keep)
        soak.pool.close()
    print()
    for name, part in parts.items():
        print(
            f"{name}: {part.done} in {part.seconds:.0f} s, {len(part.kinds)} kinds, {len(part.wrong)} wrong {part.figures or ''}"
        )
    for name, part in parts.items():
        print(*(f"{name} {text}" for text in part.wrong), sep="\n", end="\n" if part.wrong else "")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(report(chosen, parts), indent=1))
    idle = [name for name, part in parts.items() if getattr(chosen, name) and not part.done]
    print(*(f"{name}: did not run" for name in idle), sep="\n", end="\n" if idle else "")
    return 1 if idle or any(part.wrong for part in parts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
