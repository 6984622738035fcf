"""What does one case cost, part by part? CPU time of the same cases run bare, and with one part of the fuzzer more each time.

Bare is the program alone on the same ranks: the model is built and wrapped, the operations run, and nothing is recorded,
compared, hidden, kept or sent. CPU time is that of whole processes (all their threads), so that other work on the machine
is hardly in it. Used by `fuzz.py --bare`.
"""

from __future__ import annotations

import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fsdp_testing.campaign.batch import LASTING, Watch, _group, run_batch, setup_on
from fsdp_testing.campaign.case_queue import BATCH
from fsdp_testing.campaign.lane import Lane
from fsdp_testing.implementations import registry
from fsdp_testing.implementations.adapter import Adapter
from fsdp_testing.judging import batch_judge, record_stream
from fsdp_testing.judging.batch_judge import comparison_for, judge_batch
from fsdp_testing.ledger import interception
from fsdp_testing.pool import Pool
from fsdp_testing.pool.world import current_world
from fsdp_testing.pool.world_on_loan import PooledWorld
from fsdp_testing.programs.accounts import AccountedProgram, program_for
from fsdp_testing.programs.execute import RankProgram
from fsdp_testing.programs.fitting import fitted
from fsdp_testing.records import Case
from fsdp_testing.strategies import CaseDrawer, Scope, SeededChoices

SIZE = 2
RANK_PARTS = ("bare", "ledger and accounts", "late results, garbage", "snapshots", "leaks, files")
"""What a rank does, each with all that stands before it; the last one is what the fuzzer runs."""
JUDGE_PARTS = ("reading", "oracle", "comparing")


def cpu() -> float:
    """Return the CPU seconds of this process so far."""
    return time.process_time()


def run_programs(adapter: Adapter, cases: Sequence[Case], part: str, directory: str) -> float:
    """Run cases on this rank with all parts up to `part`, and return the CPU seconds of this process so far."""
    if part == RANK_PARTS[-1]:
        run_batch(adapter, cases, directory, Watch(models=True))
        return cpu()
    world = current_world()
    with warnings.catch_warnings(), _recording(part != "bare"):
        warnings.simplefilter("ignore")
        for case in cases:
            case = fitted(case, adapter)
            make = RankProgram if part == "bare" else program_for
            program = make(case, adapter, world.rank, partial(setup_on, world))
            program.late = program.garbage = part in RANK_PARTS[2:]
            program.make_group, program.files = _group, Path(directory)
            if part not in RANK_PARTS[3:]:
                program.observe = lambda label: None  # type: ignore[method-assign]
            if isinstance(program, AccountedProgram):
                note = program.collective
                with interception.listen(lambda group, call, _site, note=note: note(group, call)):
                    program.run(observe_all=case.mixed_precision is not None)
            else:
                program.run(observe_all=case.mixed_precision is not None)
            adapter.finish(program.model)
    return cpu()


@contextmanager
def _recording(wanted: bool) -> Iterator[None]:
    recorder = interception._active
    if not wanted:
        interception.activate(None)
    try:
        yield
    finally:
        interception.activate(recorder)


def judge_up_to(adapter: Adapter, cases: Sequence[Case], part: str, directory: str) -> float:
    """Do on what ranks reported all that a judge does, up to `part`, and return the CPU seconds of this process so far."""
    if part == JUDGE_PARTS[-1]:
        judge_batch(adapter, cases, SIZE, directory, observe_all=False)
        return cpu()
    for rank in range(SIZE):
        record_stream.read(directory, rank)
    for case in map(partial(fitted, adapter=adapter), cases) if part == "oracle" else ():
        if not comparison_for(case, adapter).lockstep:
            batch_judge._undisturbed(case, observe_all=False)
    return cpu()


def _in_batches(cases: Sequence[Case]) -> list[Sequence[Case]]:
    return [cases[start : start + BATCH] for start in range(0, len(cases), BATCH)]


def passing(adapter: Adapter, count: int, pool: Pool) -> list[Case]:
    """Return about so many drawn cases that the implementation passes, so that all parts run all of them to the end."""
    drawer = CaseDrawer(Scope(adapter.capabilities, world_sizes=(SIZE,)))
    drawn = [drawer.draw(SeededChoices(number)) for number in range(count)]
    lane = Lane(pool, adapter)
    results = [result for batch in _in_batches(drawn) for result in lane.run(batch)]
    return [one.case for one in results if one.note.status == "passed"]


def _cost(run: Callable[..., Any], batches: Sequence[Sequence[Case]], directories: Sequence[str]) -> float:
    """Return the CPU seconds that `run(batch, directory)` takes in its own processes, the first batch left out."""
    began = run(batches[0], directories[0])
    ended = began
    for batch, directory in zip(batches[1:], directories[1:]):
        ended = run(batch, directory)
    return sum(ended) - sum(began)


def measure(name: str, count: int, repeats: int) -> dict[str, float]:
    """Return CPU milliseconds for each case by part; those of ranks for all ranks together."""
    adapter, pool = registry.load(name), Pool()

    def on(world: PooledWorld, function: Callable[..., float], part: str) -> Callable[..., list[float]]:
        def run(batch: Sequence[Case], directory: str) -> list[float]:
            arguments = (adapter, batch, part, directory)
            outcome = world.execute(function, arguments, timeout=300.0, name=part, lasting=LASTING)
            return [rank.value for rank in outcome.ranks]

        return run

    try:
        batches = _in_batches(passing(adapter, count, pool))
        number = sum(map(len, batches[1:]))
        found: dict[str, list[float]] = {}
        for _ in range(repeats):
            with tempfile.TemporaryDirectory() as folder:
                directories = [tempfile.mkdtemp(dir=folder) for _ in batches]
                world = pool.world(SIZE)
                began, costs = cpu(), {}
                idle = _cost(on(world, run_programs, "bare"), [()] * len(batches), directories)
                for part in RANK_PARTS:
                    began = cpu()
                    costs[part] = _cost(on(world, run_programs, part), batches, directories)
                controlling = cpu() - began
                world.release()
                for part in JUDGE_PARTS:
                    world = pool.world(1)
                    costs[part] = _cost(on(world, judge_up_to, part), batches, directories)
                    world.leave()
            costs |= {"jobs (pool, hygiene)": idle, "controller": controlling}
            for part, cost in costs.items():
                found.setdefault(part, []).append(1000 * cost / number)
    finally:
        pool.close()
    return {part: statistics.median(costs) for part, costs in found.items()}


def table(name: str, costs: dict[str, float]) -> str:
    """Return the costs as lines: each part with what it adds, and which part of it all the bare programs are."""
    lines, before = [f"{name}: CPU ms for each case, {SIZE} ranks together"], 0.0
    idle = costs["jobs (pool, hygiene)"]
    for part in RANK_PARTS:
        lines.append(f"  {part:24} {costs[part] - (before or idle):7.2f}")
        before = costs[part]
    lines.append(f"  {'jobs (pool, hygiene)':24} {idle:7.2f}")
    before = 0.0
    for part in JUDGE_PARTS:
        lines.append(f"  judge: {part:17} {costs[part] - before:7.2f}")
        before = costs[part]
    lines.append(f"  {'controller':24} {costs['controller']:7.2f}")
    ranks, whole = costs[RANK_PARTS[-1]], costs[RANK_PARTS[-1]] + costs[JUDGE_PARTS[-1]] + costs["controller"]
    bare = costs["bare"] - idle
    lines.append(
        f"  {'in all':24} {whole:7.2f}; bare is {bare / ranks:.2f} of the ranks' and {bare / whole:.2f} of all"
    )
    return "\n".join(lines)
