"""How is a script run on a world, and what does it mean when it does not come to its steps?"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from fsdp_testing.pool import Pool, WorldOutcome
from fsdp_testing.pool.cause import EndedBadly
from fsdp_testing.script_check.feeding import Feed
from fsdp_testing.script_check.launched import RankReport, ScriptRun, run_here
from fsdp_testing.script_check.surroundings import show_files
from fsdp_testing.script_check.whole import WholeRun, whole

STEPS = 10


class Undecided(Exception):
    """Ends the judgement of a world: nothing can be said, for this reason."""


class Failed(Exception):
    """Ends the judgement of a world: it is wrong."""

    def __init__(self, sentence: str, table: tuple[str, ...] = (), compared: tuple[str, ...] = ()) -> None:
        super().__init__(sentence)
        self.table, self.compared = table, compared


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
    """Runs a script on worlds of a pool, each time in a folder of its own."""

    launch: Launch
    pool: Pool

    def run(
        self, size: int, *, keep_data: bool = False, feed: Feed | None = None, seed: int = 0, stay: Stay | None = None
    ) -> WholeRun:
        """Run the script on new ranks, in a folder that is removed afterwards unless it is to stay.

        Raises:
            Undecided: It did not come to an optimizer step.
            Failed: Ranks hung, disagreed about collectives, or made different numbers of steps.
        """
        if stay is not None:
            return self._run_in(stay, size, keep_data, feed, seed)
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
        world = self.pool.world(size, launch.backend, launch.isolation)
        try:
            outcome = world.execute(run_here, (job,), timeout=launch.timeout, name=launch.script)
        finally:
            world.release()
        if not outcome.ok:
            raise _ending(outcome)
        return _put_together(size, outcome.values)


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
    """Return why a script did not end well: a hang or a mismatch of ranks is a failure, an error of the script is not."""
    several = outcome.size > 1
    ended = [rank for rank in outcome.ranks if isinstance(rank.value, RankReport) and not rank.value.ended]
    if ended and len(ended) < outcome.size:
        waiting = next(rank.rank for rank in outcome.ranks if rank not in ended)
        return Failed(
            f"the ranks make different numbers of optimizer steps: rank {ended[0].rank} has made {len(ended[0].value.steps)}, "
            f"rank {waiting} fewer. Cause: a rank skips a step by a number of its own, or takes other batches."
        )
    if several and outcome.diagnosis is not None and not isinstance(outcome.diagnosis, EndedBadly):
        return Failed(
            f"{outcome.cause}. Cause: the ranks do not run the same collectives (an early stop on a local value, an uneven "
            "number of batches, a branch that depends on the rank)."
        )
    first = next((rank for rank in outcome.ranks if not rank.good), outcome.ranks[0])
    said = [line.strip() for line in first.stderr.strip().splitlines() if line.strip()]
    last = f" It said last: {said[-1][:300]}" if said else ""
    if first.error is not None and first.error.type_name == "InvalidArgument":
        return Undecided(f"{first.error.message}{last}")
    return Undecided(f"did not end well: {outcome.cause}.{last}")
