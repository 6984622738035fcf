"""How is a script run on a world, and what does it mean when it does not come to its steps?"""

from __future__ import annotations

import re
import shutil
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from fsdp_testing.ranks.pool import Pool, RankOutcome, WorldOutcome
from fsdp_testing.ranks.pool.cause import EndedBadly
from fsdp_testing.ranks.pool.outcome import Fate, rank_names
from fsdp_testing.train.script.feeding import Feed
from fsdp_testing.train.script.launched import RankReport, ScriptRun, run_here
from fsdp_testing.train.script.surroundings import show_files
from fsdp_testing.train.script.whole import WholeRun, whole

STEPS = 10
TAIL = 8
"""Lines of a script's own output that are shown where it did not end well."""
_LIBRARIES = tuple(
    f"{path}/"
    for path in {
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("purelib"),
        str(Path(torch.__file__).parent),
        str(Path(__file__).parents[2]),
    }
)
_FRAME = re.compile(r'File "([^"<]+)", line (\d+)')
_NO_CUDA = ("not compiled with CUDA", "NVIDIA driver", "No CUDA GPUs", "CUDA driver", "no CUDA-capable device")


class Undecided(Exception):
    """Ends the judgement of a world: nothing can be said, for this reason; `output` is the end of what the script said."""

    def __init__(self, sentence: str, output: tuple[str, ...] = ()) -> None:
        super().__init__(sentence)
        self.output = output


class Failed(Exception):
    """Ends the judgement of a world: it is wrong; `output` is the end of what the script said."""

    def __init__(
        self,
        sentence: str,
        table: tuple[str, ...] = (),
        compared: tuple[str, ...] = (),
        output: tuple[str, ...] = (),
    ) -> None:
        super().__init__(sentence)
        self.table, self.compared, self.output = table, compared, output


class Hung(Failed):
    """Ends the judgement of a world whose ranks did not come back in time, and of which nobody proved a deadlock."""


class RunListener(Protocol):
    """Is told of each run of the script."""

    def started(self, what: str) -> None:
        """Take note that a run begins; `what` names it in a few words."""

    def ended(self, what: str, seconds: float, outcome: WorldOutcome) -> None:
        """Take note that it ended, with what its ranks did and wrote."""


class _Nobody:
    def started(self, what: str) -> None: ...

    def ended(self, what: str, seconds: float, outcome: WorldOutcome) -> None: ...


@dataclass(frozen=True, slots=True)
class Launch:
    """How a script is started.

    Attributes:
        script: Path, or with `is_module` the name of a module.
        arguments: Those after it.
        is_module: Whether it is started with `-m`.
        steps: Optimizer steps that are compared; then the script is ended.
        timeout: Seconds until a rank counts as hung.
        backend: Backend of the worlds.
        resume_at: Step before which it is stopped to be resumed; never with 0.
        resume_arguments: Further arguments of the script that is resumed.
        accept: Names of conventions that one process is to follow as the ranks do (`conventions`).
        isolation: "fresh" runs each time in new processes; "warm" in kept ones, where modules of the script stay imported.
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


@dataclass(frozen=True, slots=True)
class Stay:
    """A run in a folder that stays, of a script that is stopped or goes on.

    Attributes:
        folder: Current folder of the run.
        steps: Steps after which it is ended; those of the launch with 0.
        stop_before: Step before which it is ended, so that what follows the step before is done; never with 0.
        arguments: Arguments after those of the launch.
    """

    folder: Path
    steps: int = 0
    stop_before: int = 0
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs a script on worlds of a pool, each time in a folder of its own; `listener` is told of it."""

    launch: Launch
    pool: Pool
    listener: RunListener = field(default_factory=_Nobody)

    def run(
        self, size: int, *, keep_data: bool = False, feed: Feed | None = None, seed: int = 0, stay: Stay | None = None
    ) -> WholeRun:
        """Run the script on new ranks, in a folder that is removed afterwards unless it is to stay.

        Raises:
            Undecided: It did not come to an optimizer step, or hung once and not again.
            Failed: Ranks hung twice, disagreed about collectives, or made different numbers of steps.
        """
        if stay is not None:
            return self._run_in(stay, size, keep_data, feed, seed)
        try:
            return self._run_anew(size, keep_data, feed, seed)
        except Hung as hung:
            self._run_anew(size, keep_data, feed, seed)  # the machine may have been slow
            raise Undecided(
                f"{hung} Run again, it came to its end: nothing is known of a script that hangs once.", hung.output
            ) from hung

    def _run_anew(self, size: int, keep_data: bool, feed: Feed | None, seed: int) -> WholeRun:
        folder = Path(self.pool.shared_directory("fsdp-verify-train-"))
        try:
            show_files(Path.cwd(), folder)
            return self._run_in(Stay(folder), size, keep_data, feed, seed)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _run_in(self, stay: Stay, size: int, keep_data: bool, feed: Feed | None, seed: int) -> WholeRun:
        launch = self.launch
        job = ScriptRun(
            script=launch.script if launch.is_module else str(Path(launch.script).resolve()),
            arguments=launch.arguments + stay.arguments,
            is_module=launch.is_module,
            steps=stay.steps or launch.steps,
            folder=str(stay.folder),
            stop_before=stay.stop_before,
            seed=seed,
            keep_data=keep_data,
            feed=feed or Feed(),
        )
        what, began = _named(size, stay, feed, seed), time.monotonic()
        self.listener.started(what)
        world = self.pool.world(size, launch.backend, launch.isolation)
        try:
            outcome = world.execute(run_here, (job,), timeout=launch.timeout, name=launch.script)
        finally:
            world.release()
        self.listener.ended(what, time.monotonic() - began, outcome)
        if not outcome.ok:
            raise _ending(outcome)
        return _put_together(size, outcome.values)


def _named(size: int, stay: Stay, feed: Feed | None, seed: int) -> str:
    who = "one process" if size == 1 else f"{size} ranks"
    how = [f"stopped before step {stay.stop_before}"] if stay.stop_before else []
    how += ["resumed"] if stay.steps else []
    how += ["given the rows of all ranks"] if feed is not None and feed.source is not None else []
    how += [f"how far roundings move it ({seed})"] if seed else []
    return ", ".join([who, *how])


def _put_together(size: int, ranks: list[RankReport]) -> WholeRun:
    counts = [len(rank.steps) for rank in ranks]
    if not any(counts):
        raise Undecided(
            "never steps an optimizer of torch.optim after a forward with gradients. Let it train; give it all its arguments."
        )
    if len(set(counts)) > 1:
        raise Failed(
            f"the ranks make different numbers of optimizer steps: {', '.join(map(str, counts))}. Cause: a rank stops or skips "
            "a step by a number of its own (an early stop on a local value, an uneven number of batches)."
        )
    unreadable = next((seen.unreadable for rank in ranks for seen in rank.steps if seen.unreadable), "")
    if unreadable:
        raise Undecided(
            f"holds its parameters in a way that cannot be read ({unreadable}). Known are plain tensors, DDP, FSDP1, FSDP2 and "
            "other DTensors without partial placements, and fsdp_ref."
        )
    return whole(size, ranks)


def _ending(outcome: WorldOutcome) -> Exception:
    """Return why a script did not end well.

    What one process runs to its end and several ranks do not (they raise, die, hang, or disagree) is a failure. What is
    missing here (an accelerator, a download) says nothing.
    """
    several = outcome.size > 1
    ended = [rank for rank in outcome.ranks if isinstance(rank.value, RankReport) and not rank.value.ended]
    if ended and len(ended) < outcome.size:
        waiting = next(rank.rank for rank in outcome.ranks if rank not in ended)
        return Failed(
            f"the ranks make different numbers of optimizer steps: rank {ended[0].rank} has made {len(ended[0].value.steps)}, "
            f"rank {waiting} fewer. Cause: a rank skips a step by a number of its own, or takes other batches."
        )
    bad = outcome.diagnosis.first if isinstance(outcome.diagnosis, EndedBadly) else None
    first = bad or next((rank for rank in outcome.ranks if not rank.good), outcome.ranks[0])
    output = tail(first)
    # A deadlock is proved without waiting; what only took too long may come to its end another time.
    late = Hung if any(rank.fate is Fate.HUNG for rank in outcome.ranks) else Failed
    if several and outcome.diagnosis is not None and not isinstance(outcome.diagnosis, EndedBadly):
        return late(
            f"{outcome.cause}.{_places(outcome.ranks)} Cause: the ranks do not run the same collectives (an early stop on a "
            "local value, an uneven number of batches, a branch that depends on the rank).",
            output=output,
        )
    if first.error is not None and first.error.type_name == "InvalidArgument":
        return Undecided(first.error.message, output)
    if first.error is not None and any(words in first.error.message for words in _NO_CUDA):
        return Undecided(
            f"asks for a CUDA device, and there is none here ({first.error.headline()}).{_places([first])} Let it take the CPU "
            "where torch.cuda.is_available() says no, or give it the argument that does.",
            output,
        )
    where = _places(outcome.ranks if first.fate in _WAITING else [first])
    said = f"did not end well: {outcome.cause}.{where}"
    if not several:
        return Undecided(said, output)
    return late(said, output=output)


_WAITING = (Fate.HUNG, Fate.STOPPED)


def tail(rank: RankOutcome) -> tuple[str, ...]:
    """Return the end of what a rank of the script wrote, standard output before errors."""
    return tuple(
        f"{stream} of rank {rank.rank}: {line}"
        for stream, text in (("stdout", rank.stdout), ("stderr", rank.stderr))
        for line in [line.rstrip() for line in text.splitlines() if line.strip()][-TAIL:]
    )


def _places(ranks: Sequence[RankOutcome]) -> str:
    """Return where in the user's own files the ranks raised, or are, as a sentence; empty where nobody knows."""
    found: dict[str, list[int]] = {}
    for rank in ranks:
        # A traceback ends where the error was raised, a stack of a running process begins where it is.
        raised = rank.error is not None
        lines = _own_lines(rank.error.traceback)[::-1] if rank.error is not None else _own_lines(rank.stack)
        if lines:
            found.setdefault(f"{'raised' if raised else 'is'} at {lines[0]}", []).append(rank.rank)
    places = [f"{rank_names(numbers)} {place}" for place, numbers in found.items()]
    return f" In the script: {'; '.join(places)}." if places else ""


def _own_lines(trace: str) -> list[str]:
    """Return file and line of each frame that is of no library, in the order of the trace."""
    frames = [(path, line) for path, line in _FRAME.findall(trace) if not path.startswith(_LIBRARIES)]
    return [f"{Path(path).name}:{line}" for path, line in frames]
