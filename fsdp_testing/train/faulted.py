"""Judges a training with injected faults: it must stop on every rank and say why, or compute the same as without them.

The harness does not intervene: a failed rank exits, as a launcher's process does, no rank is stopped before the limit, and the
ledger refuses nothing. If the training can resume, it is started again from what it has saved, like a restarted job.
"""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fsdp_testing.cases.records import Verdict
from fsdp_testing.ranks.faults.fault import SILENT, Fault
from fsdp_testing.ranks.pool import Fate, RankOutcome, WorldOutcome
from fsdp_testing.ranks.pool.outcome import rank_names
from fsdp_testing.train.on_rank import RankReport, RunSettings
from fsdp_testing.train.relations import judge_varied
from fsdp_testing.train.report import Judgement
from fsdp_testing.train.resuming import compare_resumed, files_below
from fsdp_testing.train.running import Failed, Runner, Undecided
from fsdp_testing.train.surroundings import show_files
from fsdp_testing.train.whole import WholeRun


def judge_faults(runner: Runner, runs: Mapping[int, WholeRun], size: int, faulty: Runner) -> Judgement:
    """Run a script on `size` ranks with faults, and say how it ends.

    Args:
        runner: Runs it as it is.
        runs: Those runs, by number of ranks; there is one of one process and one of `size`.
        size: Number of ranks.
        faulty: Runs it with faults.
    """
    faults = faulty.start.faults
    name = " ".join(f"--fault {fault}" for fault in faults)
    folder = Path(runner.pool.shared_directory("fsdp-verify-fault-"))
    try:
        outcome = _run(faulty, size, folder / "0")
        _check_reached(faults, outcome)
        if outcome.all_good:
            names = ("the run without a fault", "the run with it")
            same = judge_varied(runner, runs, size, faulty, (name, names))
            lines = (*same.compared, *([f"with the fault, {outcome.cause}"] if outcome.cause else []))
            if same.verdict is Verdict.PASS and (saved := files_below(folder / "0")):
                lines = (*lines, _saved_files(folder / "0", saved))
            if runner.start.resumes:
                lines = (*lines, "not started again: no rank stopped")
            return replace(same, sentence=f"every rank continues to the end. {same.sentence}", compared=lines)
        hit = {
            rank for rank in range(size) for fault in faults if fault.kind in SILENT and _reached(fault, outcome, rank)
        }
        if _late(outcome, hit):
            again = _run(faulty, size, folder / "1")
            if not _late(again, hit):
                raise Undecided(f"{_accounts(_late(outcome, hit))} once, and not when it was run again.")
        _check_tells_of_script(outcome, hit)
        sentences = [_stopped(outcome, hit, runs[size].steps, faulty.timeout(size))]
        sentences += [_checkpoint(runner, runs, size, folder / "0")]
    except Failed as why:
        return Judgement(size, Verdict.FAIL, str(why), table=why.table, relation=name, first=why.first)
    except Undecided as why:
        return Judgement(size, Verdict.UNKNOWN, str(why), relation=name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Judgement(size, Verdict.PASS, " ".join(sentences), relation=name)


def _run(runner: Runner, size: int, folder: Path) -> WorldOutcome:
    folder.mkdir()
    show_files(Path.cwd(), folder)
    settings = RunSettings(folder=str(folder), steps=runner.start.steps, faults=runner.start.faults)
    return runner.execute(size, settings)


def _reached(fault: Fault, outcome: WorldOutcome, rank: int) -> bool:
    return fault.reached_in(outcome.ranks[rank].stderr)


def _check_reached(faults: Sequence[Fault], outcome: WorldOutcome) -> None:
    """Refuse to judge a run that ended before it came to a fault.

    Raises:
        Undecided: It ended before the fault.
    """
    for fault in faults:
        if any(_reached(fault, outcome, rank) for rank in range(outcome.size)):
            continue
        counts = ", ".join(f"rank {rank.rank}: {sum(rank.issued.values())}" for rank in outcome.ranks)
        steps = {len(rank.value.steps) for rank in outcome.ranks if isinstance(rank.value, RankReport)}
        made = f" and {max(steps)} optimizer steps" if steps else ""
        raise Undecided(
            f"never reaches the fault {fault}: it makes {counts} collectives{made} by the end of what is run. Name an earlier "
            f"place, or run more steps (--steps). {outcome.cause}".rstrip()
        )


def _check_tells_of_script(outcome: WorldOutcome, hit: set[int]) -> None:
    """Refuse to judge a run that shows nothing about the script.

    Raises:
        Undecided: A fault could not be made, keeps every rank, or ranks wait for one that had made all steps.
    """
    for rank in outcome.ranks:
        if rank.error is not None and rank.error.type_name == "HarnessError":
            raise Undecided(f"{rank_names([rank.rank])}: {rank.error.message}")
    if len(hit) == outcome.size:
        raise Undecided(
            f"{_accounts(outcome.ranks)}: the faults hit every rank, so none could show how it stops. Name one "
            f"(rank=1)."
        )
    done = [r.rank for r in outcome.ranks if isinstance(r.value, RankReport) and not r.value.ended]
    if done and _late(outcome, hit):
        raise Undecided(
            f"{rank_names(done)} had made all steps, and others wait. Name an earlier place, or run more steps (--steps)."
        )


def _late(outcome: WorldOutcome, hit: set[int]) -> list[RankOutcome]:
    """Return the ranks that had not stopped by the limit, though no fault keeps them."""
    return [rank for rank in outcome.ranks if rank.fate is Fate.HUNG and rank.rank not in hit]


def _accounts(ranks: Sequence[RankOutcome]) -> str:
    """Say how ranks ended, grouped by equal ends."""
    alike: dict[str, list[int]] = {}
    for rank in ranks:
        alike.setdefault(rank.ending(), []).append(rank.rank)
    return "; ".join(f"{rank_names(numbers)} {ending}" for ending, numbers in alike.items())


def _stopped(outcome: WorldOutcome, hit: set[int], steps: int, timeout: float) -> str:
    """Return how every rank stopped.

    Args:
        outcome: The ranks' ends.
        hit: Those that a fault ended or keeps.
        steps: How many a run without a fault makes.
        timeout: The limit in seconds.

    Raises:
        Failed: A rank did not stop, or ended without an error.
        Undecided: A rank had already made all steps.
    """
    others = [rank for rank in outcome.ranks if rank.rank not in hit]
    ended = _accounts([rank for rank in outcome.ranks if rank.rank in hit])
    ended = f"{ended}; " if ended else ""
    if late := _late(outcome, hit):
        where = [
            f"rank {rank.rank} waits in {last} at {last.call_site}" for rank in late if (last := rank.last_collective())
        ]
        names, waits = rank_names(rank.rank for rank in late), "; ".join(where) or "without any collective"
        raise Failed(
            f"{ended}{names} did not stop within {timeout:g} s ({waits}). Give torch.distributed.init_process_group a timeout, "
            "and the job a watchdog."
        )
    for rank in others:
        if rank.fate is Fate.DIED and rank.signal_name:
            raise Failed(f"{ended}{_accounts([rank])} without a message.")
        if rank.fate is not Fate.RETURNED:
            continue
        made = len(rank.value.steps) if isinstance(rank.value, RankReport) else 0
        if made < steps and rank.value.ended:
            raise Failed(
                f"{ended}rank {rank.rank} ended without an error after {made} of {steps} steps, as if the training were over. "
                "Let it leave with an exception or an exit code."
            )
        raise Undecided(
            f"{ended}rank {rank.rank} had made all {made} steps by then. Name an earlier place, or run more steps."
        )
    return f"{ended}{_accounts(others)}." if others else f"{ended.rstrip('; ')}."


def _checkpoint(runner: Runner, runs: Mapping[int, WholeRun], size: int, folder: Path) -> str:
    """Return how the saved files can be used.

    Raises:
        Failed: Nothing of it can be read, or the run that continues from it computes differently.
        Undecided: It was not loaded.
    """
    saved, start = files_below(folder), runner.start
    if not saved:
        return "It had saved nothing by then."
    if not start.resumes:
        return f"It had {_saved_files(folder, saved)}; with --resume-args it restarts from there."
    try:
        compared = compare_resumed(runner, runs, (size, size), folder, stopped=0)
    except Failed as why:
        raise Failed(
            f"with what it had saved by then ({', '.join(saved[:5])}) {start.sentence(size, why)}",
            table=why.table,
            first=why.first,
        ) from why
    return f"Started again from what it had saved, it continues as the run without a fault ({compared})."


def _saved_files(folder: Path, saved: Sequence[str]) -> str:
    """Return which files were saved, and which of them are damaged.

    Raises:
        Failed: Every saved archive is damaged.
    """
    archives = [name for name in saved if Path(name).suffix in (".pt", ".pth", ".ckpt", ".bin")]
    broken = [name for name in archives if is_damaged(folder / name)]
    if broken and broken == archives:
        raise Failed(
            f"every file that it had saved is damaged: {', '.join(broken[:5])}. Write a new file, read it again, and only then "
            "rename it over the old one."
        )
    return f"saved {', '.join(saved[:5])}" + (f" (damaged: {', '.join(broken[:5])})" if broken else "")


def is_damaged(path: Path) -> bool:
    """Whether a file is empty or a broken archive of torch.save; other kinds of files do not count."""
    with path.open("rb") as file:
        start = file.read(4)
    if start not in (b"", b"PK\x03\x04"):
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is not None
    except (OSError, zipfile.BadZipFile):
        return True
