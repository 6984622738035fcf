"""The cost of one case, part by part: CPU time of the same cases run bare, and with one part of the fuzzer more each time.

Bare is the program alone on the same ranks: the model is built and wrapped, the operations run, and nothing is recorded,
compared, hidden, kept or sent. CPU time is that of whole processes (all their threads), so that other work on the machine
is hardly in it. Used by `fuzz.py --bare`.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from fsdp_testing.adapters import registry
from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.cases.drawing import CaseDrawer, Scope, SeededChoices
from fsdp_testing.cases.records import Case, Verdict
from fsdp_testing.judging import batch_judge, record_stream
from fsdp_testing.judging.batch import LASTING, Watch, _group, run_batch, setup_on
from fsdp_testing.judging.batch_judge import comparison_for, judge_batch
from fsdp_testing.judging.case_runner import CaseRunner
from fsdp_testing.oracle.accounts import AccountedProgram, program_for
from fsdp_testing.oracle.execute import RankProgram
from fsdp_testing.oracle.setup import fitted
from fsdp_testing.ranks.ledger import interception
from fsdp_testing.ranks.pool import Pool
from fsdp_testing.ranks.pool.world import current_world
from fsdp_testing.search.campaign.case_queue import BATCH

SIZE = 2
RANK_PARTS = ("bare", "ledger and accounts", "late results, garbage", "snapshots", "leaks, files")
"""What a rank does, each with all that stands before it; the last one is what the fuzzer runs."""
JUDGE_PARTS = ("reading", "oracle", "comparing")
"""Likewise; where the oracle follows the implementation step by step, its replays are part of comparing."""
JOBS, CONTROLLER = "jobs (pool, hygiene)", "controller"


def cpu() -> float:
    """Return the CPU seconds of this process so far."""
    return time.process_time()


def run_programs(adapter: Adapter, cases: Sequence[Case], part: str, directory: str) -> float:
    """Run cases on this rank with all parts up to `part`, and return the CPU seconds of this process so far.

    Collectives: those of the implementation; every rank of the world runs the same call.
    """
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
                program.observe = lambda label: None  # type: ignore[method-assign]  # this part reads nothing
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
    batch_judge._LATEST.clear()
    batch_judge._FOLLOWED.clear()
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
    runner = CaseRunner(pool)
    results = [judged for batch in _in_batches(drawn) for judged in runner.judge_batch(adapter, batch)]
    return [judged.case for judged in results if judged.verdict is Verdict.PASS]


def measure(name: str, count: int, repeats: int) -> dict[str, float]:
    """Return CPU milliseconds for each case by part; those of ranks for all ranks together.

    The parts take turns, batch by batch, so that whatever else the machine does meets all of them. The first batch warms up.
    """
    adapter, pool, costs = registry.load(name), Pool(), Counter[str]()

    def take_turns(size: int, function: Callable[..., float], parts: Sequence[str], folder: str) -> None:
        world = pool.world(size)
        before = 0.0
        for place, batch in enumerate(batches):
            for part in parts:
                controlling = cpu()
                arguments = (adapter, batch if part != JOBS else (), part, f"{folder}/{place}")
                outcome = world.execute(function, arguments, timeout=300.0, name=part, lasting=LASTING)
                if not outcome.ok:
                    raise SystemExit(outcome.describe())
                ended = sum(rank.value for rank in outcome.ranks)
                costs[part] += ended - before if place else 0.0
                costs[CONTROLLER] += cpu() - controlling if place and part == parts[-1] else 0.0
                before = ended
        world.release()

    try:
        batches = _in_batches(passing(adapter, count, pool))
        for _ in range(repeats):
            with tempfile.TemporaryDirectory() as folder:
                for place, _batch in enumerate(batches):
                    (Path(folder) / str(place)).mkdir()
                take_turns(SIZE, run_programs, (JOBS, *RANK_PARTS), folder)
                take_turns(1, judge_up_to, JUDGE_PARTS, folder)
    finally:
        pool.close()
    cases = repeats * sum(map(len, batches[1:]))
    return {part: 1000 * cost / cases for part, cost in costs.items()}


def table(name: str, costs: Mapping[str, float]) -> str:
    """Return the costs as lines: each part with what it adds, and which part of it all the bare programs are."""
    lines, before = [f"{name}: CPU ms for each case, {SIZE} ranks together", _line(JOBS, costs[JOBS])], costs[JOBS]
    for part in RANK_PARTS:
        lines.append(_line(part, costs[part] - before))
        before = costs[part]
    before = 0.0
    for part in JUDGE_PARTS:
        lines.append(_line(f"judge: {part}", costs[part] - before))
        before = costs[part]
    ranks, bare = costs[RANK_PARTS[-1]], costs[RANK_PARTS[0]] - costs[JOBS]
    whole = ranks + costs[JUDGE_PARTS[-1]] + costs[CONTROLLER]
    share = f"; bare is {bare / ranks:.2f} of what ranks take and {bare / whole:.2f} of all"
    return "\n".join([*lines, _line(CONTROLLER, costs[CONTROLLER]), _line("in all", whole) + share])


def _line(part: str, milliseconds: float) -> str:
    return f"  {part:24} {milliseconds:7.2f}"
