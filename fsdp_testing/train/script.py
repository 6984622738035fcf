"""Checks that an unmodified training script gives on N ranks what one process gives on the data of all ranks."""

from __future__ import annotations

import re
import shutil
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch

from fsdp_testing.cases.records import Verdict
from fsdp_testing.errors import InvalidArgument
from fsdp_testing.ranks.faults.fault import Fault, check_together
from fsdp_testing.ranks.pool import Pool, RankOutcome, WorldOutcome, default_pool
from fsdp_testing.ranks.pool.cause import EndedBadly
from fsdp_testing.ranks.pool.outcome import UNSENT, Fate, rank_names
from fsdp_testing.train import relations
from fsdp_testing.train.check import judged, run_alone
from fsdp_testing.train.conventions import check_names
from fsdp_testing.train.elsewhere import Elsewhere, elsewhere, execute_elsewhere
from fsdp_testing.train.faulted import judge_faults
from fsdp_testing.train.nan import ReadTooEarly
from fsdp_testing.train.on_rank import RankReport, RunSettings
from fsdp_testing.train.report import Judgement, TrainingDiffers, TrainingUndecided, TrainReport
from fsdp_testing.train.resuming import judge_resumed
from fsdp_testing.train.running import Failed, NotEnded, RunListener, Runner, Start, Undecided, unequal_ends
from fsdp_testing.train.script_job import ScriptJob
from fsdp_testing.train.streams import judge_streams
from fsdp_testing.train.surroundings import show_files
from fsdp_testing.train.whole import WholeRun

STEPS = 10
TAIL = 8
"""Lines of a script's own output that are shown if it did not end well."""
_LIBRARIES = tuple(
    f"{path}/"
    for path in {
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("purelib"),
        str(Path(torch.__file__).parent),
        str(Path(__file__).parents[1]),
    }
)
_FRAME = re.compile(r'File "([^"<]+)", line (\d+)')
_NO_CUDA = ("not compiled with CUDA", "NVIDIA driver", "No CUDA GPUs", "CUDA driver", "no CUDA-capable device")


class ScriptDiffers(TrainingDiffers):
    """A script trains differently on N ranks than in one process; the message names the first difference and step."""


class ScriptUndecided(TrainingUndecided):
    """No verdict on a script with some number of ranks; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Launch(Start):
    """How a script is started: see `Start`.

    Attributes:
        script: Path, or with `is_module` the name of a module.
        arguments: Those after it.
        is_module: Whether it is started with `-m`.
        vary: For each relation of arguments or rows its words (`relations.read`).
        against: Environments and commits whose runs it must equal.
        elsewhere: The one in which it is started; empty for this one.
    """

    script: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    steps: int = STEPS
    timeout: float = 300.0
    backend: str = "gloo"
    isolation: str = "fresh"
    resume_at: int = 0
    resume_arguments: tuple[str, ...] = ()
    accept: tuple[str, ...] = ()
    vary: tuple[tuple[str, ...], ...] = ()
    streams: bool = False
    against: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()
    variation: str = ""
    elsewhere: Elsewhere = Elsewhere()

    takes_rows: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return self.script

    def job(self, size: int) -> ScriptJob:
        script = self.script if self.is_module else str(Path(self.script).resolve())
        return ScriptJob(script, self.arguments, self.is_module, self.elsewhere.moved)

    @contextmanager
    def prepared(self, pool: Pool, run: RunSettings) -> Iterator[RunSettings]:
        """Give a run a folder of its own, which is removed afterwards, unless it has one that stays."""
        if run.folder:
            yield run
            return
        folder = Path(pool.shared_directory("fsdp-verify-train-"))
        try:
            for source in (self.elsewhere.moved_path(Path.cwd()), Path.cwd()):
                show_files(source, folder)
            yield replace(run, folder=str(folder))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def execute(self, pool: Pool, size: int, run: RunSettings) -> WorldOutcome:
        """Run it on a world of the pool, or of another environment."""
        if self.elsewhere.python:
            return execute_elsewhere(self.elsewhere.python, replace(self, elsewhere=Elsewhere()), size, run)
        return Start.execute(self, pool, size, run)

    def ending(self, outcome: WorldOutcome) -> Exception:
        return _ending(outcome, works=bool(self.variation))

    def check(self, ranks: Sequence[RankReport]) -> None:
        """Refuse a script that never steps, or whose parameters cannot be read."""
        if not any(rank.steps for rank in ranks):
            raise Undecided(
                "never steps a torch.optim optimizer after a training forward. Give it the arguments with which it trains."
            )
        unreadable = next((seen.unreadable for rank in ranks for seen in rank.steps if seen.unreadable), "")
        if unreadable:
            raise Undecided(
                f"holds its parameters in a way that cannot be read ({unreadable}). Known are plain tensors, DDP, FSDP1, FSDP2 "
                "and other DTensors without partial placements, and fsdp_ref."
            )


def check_script(
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    world_sizes: Sequence[int] = (2, 3),
    steps: int = STEPS,
    timeout: float = 300.0,
    accept: Sequence[str] = (),
) -> TrainReport:
    """Run an unmodified training script on worlds of several sizes and compare each with one process.

    Args:
        script: Path of a script that torchrun can start.
        arguments: Its arguments.
        world_sizes: Numbers of ranks; one process is always run.
        steps: Optimizer steps to compare; then the script is ended.
        timeout: Seconds until a rank counts as hung.
        accept: Conventions by which N ranks differ from one process; the one process then follows them too:
            "scheduler-per-process", "batch-norm-per-rank", "loss-per-rank". And "measured-gradients": backward passes whose
            gradients are all cleared before the step do not count.

    Returns:
        What was compared, for each size.

    Raises:
        ScriptDiffers: A world trains differently.
        ScriptUndecided: A world, or the script, gives no verdict.
        InvalidArgument: The script does not exist, or no size is above 1.
    """
    launch = Launch(str(script), tuple(map(str, arguments)), steps=steps, timeout=timeout, accept=tuple(accept))
    report = examine(launch, world_sizes)
    if report.verdict is Verdict.FAIL:
        raise ScriptDiffers(str(report))
    if report.verdict is Verdict.UNKNOWN:
        raise ScriptUndecided(str(report))
    return report


def examine(
    launch: Launch, world_sizes: Sequence[int], pool: Pool | None = None, listener: RunListener | None = None
) -> TrainReport:
    """Judge a script on each world size above 1; a listener is told of each run.

    Raises:
        InvalidArgument: The script does not exist, or no size is above 1.
    """
    sizes = [size for size in world_sizes if size > 1]
    _check_arguments(launch, world_sizes)
    arguments, variations, rows = relations.read(launch.vary, launch.arguments)
    faulty = replace(launch, arguments=arguments)
    launch = replace(faulty, faults=())
    runner = Runner(launch, pool or default_pool(), listener)
    with ExitStack() as stack:
        others = [replace(launch, arguments=one.arguments, variation=one.names[1]) for one in variations]
        named = [(one.name, one.names) for one in variations]
        for target in launch.against:
            others.append(_launch_of(launch, stack.enter_context(elsewhere(target, launch.script, runner.pool))))
            named.append((f"--against {target}", ("this version", target)))
        return _examined(runner, sizes or [1], rows, list(zip(others, named)), faulty)


def _launch_of(launch: Launch, place: Elsewhere) -> Launch:
    script = launch.script if launch.is_module else str(place.moved_path(Path(launch.script).resolve()))
    return replace(launch, script=script, elsewhere=place, variation=f"of {place.name}")


def _examined(
    runner: Runner,
    sizes: Sequence[int],
    rows: Sequence[str],
    others: Sequence[tuple[Launch, tuple[str, tuple[str, str]]]],
    faulty: Launch,
) -> TrainReport:
    """Judge a script on each world size, and then the changes that must change nothing.

    Args:
        runner: Runs it.
        sizes: Numbers of ranks.
        rows: Names of relations of rows.
        others: Other ways of starting it, with the name of the relation and how both runs are called.
        faulty: The script with faults, for one more run.
    """
    launch = runner.start
    try:
        alone, again = run_alone(runner, 1)
        if runner.unsteady:
            raise Undecided(" ".join(runner.unsteady))
    except (Failed, Undecided) as why:
        verdict = Verdict.FAIL if isinstance(why, ReadTooEarly) else Verdict.UNKNOWN
        return TrainReport(launch.name, (Judgement(1, verdict, f"one process {why}", output=why.output),))
    runs = {1: alone}
    remarks = _touched(alone, again)
    judgements = [judged(runner, runs, size) for size in sizes if size > 1]
    if launch.resume_at:
        judgements += _resumed(runner, runs, judgements)
    if launch.streams:
        judgements += [judge_streams(runner, size) for size in sizes if size > 1]
    if faulty.faults:
        passed = [
            judgement.size for judgement in judgements if judgement.verdict is Verdict.PASS and not judgement.relation
        ]
        beside = runner.beside(faulty)
        judgements += [judge_faults(runner, runs, size, beside) for size in passed if _has_ranks(size, faulty.faults)]
    judgements += [relations.judge_rows(runner, alone, relation) for relation in rows]
    for other, relation in others:
        beside = runner.beside(other)
        judgements += [relations.judge_varied(runner, runs, size, beside, relation) for size in sizes]
    return TrainReport(launch.name, tuple(replace(one, compared=one.compared + remarks) for one in judgements))


def _has_ranks(size: int, faults: Sequence[Fault]) -> bool:
    return all(fault.rank is None or fault.rank < size for fault in faults)


def _check_arguments(launch: Launch, world_sizes: Sequence[int]) -> None:
    check_names(launch.accept)
    check_together(launch.faults)
    if not any(size > 1 for size in world_sizes) and not (launch.vary or launch.against):
        raise InvalidArgument(
            f"world sizes: expected one above 1, got {tuple(world_sizes)}. One process is always run."
        )
    if not launch.is_module and not Path(launch.script).is_file():
        raise InvalidArgument(
            f"script: expected a file, got {launch.script!r}. Correct the path, or use -m for a module."
        )
    if launch.streams and not any(size > 1 for size in world_sizes):
        raise InvalidArgument(
            f"streams: expected a world size above 1, got {tuple(world_sizes)}. Races are sought on ranks."
        )
    if launch.faults and not any(_has_ranks(size, launch.faults) for size in world_sizes if size > 1):
        raise InvalidArgument(
            f"fault: expected ranks of one of the worlds {tuple(world_sizes)} above 1, got {', '.join(map(str, launch.faults))}. "
            "Ranks count from 0; name another rank, or another world size."
        )
    if launch.resume_at and launch.resume_at >= launch.steps:
        raise InvalidArgument(
            f"resume-at: expected a step below {launch.steps}, the steps compared, got {launch.resume_at}. Compare more steps."
        )


def _resumed(runner: Runner, runs: dict[int, WholeRun], judgements: Sequence[Judgement]) -> list[Judgement]:
    """Judge resuming: what is saved on each number of ranks is loaded on as many and on the next number, the last on one."""
    passed = [judgement.size for judgement in judgements if judgement.verdict is Verdict.PASS]
    following = dict(zip(passed, [*passed[1:], 1]))
    return [judge_resumed(runner, runs, size, (size, following[size])) for size in passed]


def _touched(alone: WholeRun, again: WholeRun) -> tuple[str, ...]:
    """Return a sentence on each file elsewhere that every run writes, if it is no temporary file, and on each machine."""
    same = sorted({*alone.ranks[0].outside} & {*again.ranks[0].outside})
    files = [
        f"writes to {path}, outside the current folder: every run overwrites it. Give the script a relative path."
        for path in same[:5]
    ]
    hosts = alone.ranks[0].hosts
    return (*files, *(f"asks for {h} in every run. Download its files beforehand." for h in hosts))


def _ending(outcome: WorldOutcome, *, works: bool = False) -> Exception:
    """Return why a script did not end well.

    Args:
        outcome: What its ranks did.
        works: Whether the unvaried script finishes on as many ranks.

    A script that one process finishes and several ranks do not (they raise, die, hang, or disagree) fails. Something missing
    on this machine (an accelerator, a download) gives no verdict.
    """
    several = outcome.size > 1 or works
    unequal = unequal_ends(outcome)
    if unequal is not None:
        return unequal
    bad = outcome.diagnosis.first if isinstance(outcome.diagnosis, EndedBadly) else None
    first = bad or next((rank for rank in outcome.ranks if not rank.good), outcome.ranks[0])
    output = tail(first)
    if outcome.size > 1 and outcome.diagnosis is not None and not isinstance(outcome.diagnosis, EndedBadly):
        return Failed(
            f"{outcome.cause}.{_places(outcome.ranks)} Cause: the ranks do not run the same collectives (an early stop on a "
            "local value, an uneven number of batches, a branch that depends on the rank).",
            output=output,
        )
    if first.error is not None and first.error.type_name == "InvalidArgument":
        return Undecided(first.error.message, output)
    if first.error is not None and UNSENT in first.error.message:
        return Undecided(f"cannot be compared: {first.error.message}", output)
    if first.error is not None and any(words in first.error.message for words in _NO_CUDA):
        return Undecided(
            f"asks for a CUDA device, and this machine has none ({first.error.headline()}).{_places([first])} Let it use the "
            "CPU if torch.cuda.is_available() is false, or pass its argument for the CPU.",
            output,
        )
    where = _places(outcome.ranks if first.fate in _WAITING else [first])
    if outcome.size == 1 and first.fate is Fate.HUNG and outcome.cause is not None:
        return Undecided(
            f"does not reach the steps that are compared: {outcome.cause}.{where} Compare fewer --steps, make the model and "
            "batches smaller, raise --timeout, give it the arguments with which it steps an optimizer, or write `except "
            "Exception` where a bare `except:` takes what ends it after these steps.",
            output,
        )
    sentence = f"did not end well: {str(outcome.cause).rstrip('.')}.{where}"
    if not several:
        return NotEnded(sentence, output)
    return Failed(sentence, output=output)


_WAITING = (Fate.HUNG, Fate.STOPPED)


def tail(rank: RankOutcome) -> tuple[str, ...]:
    """Return the end of a rank's output, standard output before errors."""
    return tuple(
        f"{stream} of rank {rank.rank}: {line}"
        for stream, text in (("stdout", rank.stdout), ("stderr", rank.stderr))
        for line in [line.rstrip() for line in text.splitlines() if line.strip()][-TAIL:]
    )


def _places(ranks: Sequence[RankOutcome]) -> str:
    """Return where in the user's own files the ranks raised, or are, as a sentence; empty if unknown."""
    lines_of: dict[str, list[int]] = {}
    for rank in ranks:
        # A traceback ends where the error was raised, a stack of a running process begins where it is.
        raised = rank.error is not None
        lines = _own_lines(rank.error.traceback)[::-1] if rank.error is not None else _own_lines(rank.stack)
        if lines:
            lines_of.setdefault(f"{'raised' if raised else 'is'} at {lines[0]}", []).append(rank.rank)
    places = [f"{rank_names(numbers)} {place}" for place, numbers in lines_of.items()]
    return f" In the script: {'; '.join(places)}." if places else ""


def _own_lines(trace: str) -> list[str]:
    """Return file and line of each frame that is of no library, in the order of the trace."""
    frames = [(path, line) for path, line in _FRAME.findall(trace) if not path.startswith(_LIBRARIES)]
    return [f"{Path(path).name}:{line}" for path, line in frames]
