"""Does a training script that nobody changed give on N ranks what one process gives on the data of all ranks?

One process runs the script twice: it must repeat itself. Each world runs it once. Where a world sees the same rows at each
step as one process does, the two runs are compared as they are; otherwise one process runs the script again, given the rows
of the ranks in place of its own.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fsdp_testing.errors import HarnessError, InvalidArgument
from fsdp_testing.pool import Pool, WorldOutcome, default_pool
from fsdp_testing.pool.cause import EndedBadly
from fsdp_testing.records import Verdict
from fsdp_testing.script_check import causes
from fsdp_testing.script_check.feeding import Feed, feed_of
from fsdp_testing.script_check.launched import RankReport, ScriptRun, run_here, show_files
from fsdp_testing.script_check.report import Judgement, ScriptReport, compared_lines
from fsdp_testing.script_check.whole import WholeRun, initial, whole
from fsdp_testing.training_check.comparison import ROUNDINGS, Decided, Quantities, beyond_roundings, first_difference
from fsdp_testing.training_check.whole import GRADIENT, PARAMETER, comparable, loss_table, only

STEPS = 10


class ScriptDiffers(AssertionError):
    """A script trains otherwise on N ranks than in one process; the message names the first difference and step."""


class ScriptUndecided(HarnessError):
    """Nothing can be said of a script on some world size; the message says why and what to do."""


class _Undecided(Exception):
    """Ends the judgement of a world: nothing can be said, for this reason."""


class _Failed(Exception):
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
        isolation: "fresh" runs each time in new processes; "warm" in kept ones, where modules of the script stay imported.
    """

    script: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    steps: int = STEPS
    timeout: float = 300.0
    backend: str = "gloo"
    isolation: str = "fresh"


def check_script(
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    world_sizes: Sequence[int] = (2, 3),
    steps: int = STEPS,
    timeout: float = 300.0,
) -> ScriptReport:
    """Run an unmodified training script on worlds of several sizes and compare each with one process.

    Args:
        script: Path of a script that torchrun can start.
        arguments: Its arguments.
        world_sizes: Numbers of ranks; one process is always run.
        steps: Optimizer steps that are compared; then the script is ended.
        timeout: Seconds until a rank counts as hung.

    Returns:
        What was compared, for each size.

    Raises:
        ScriptDiffers: A world trains otherwise.
        ScriptUndecided: Nothing can be said of a world, or of the script.
        InvalidArgument: There is no such script, or no size above 1.
    """
    report = examine(Launch(str(script), tuple(map(str, arguments)), steps=steps, timeout=timeout), world_sizes)
    if report.verdict is Verdict.FAIL:
        raise ScriptDiffers(str(report))
    if report.verdict is Verdict.UNKNOWN:
        raise ScriptUndecided(str(report))
    return report


def examine(launch: Launch, world_sizes: Sequence[int], pool: Pool | None = None) -> ScriptReport:
    """Judge a script on each world size above 1.

    Raises:
        InvalidArgument: There is no such script, or no size above 1.
    """
    sizes = [size for size in world_sizes if size > 1]
    if not sizes:
        raise InvalidArgument(
            f"world sizes: expected one above 1, got {tuple(world_sizes)}. One process is always run."
        )
    if not launch.is_module and not Path(launch.script).is_file():
        raise InvalidArgument(
            f"script: expected a file, got {launch.script!r}. Correct the path, or use -m for a module."
        )
    runner = _Runner(launch, pool or default_pool())
    try:
        alone = runner.run(1)
        _check_alone(runner, alone)
    except _Undecided as why:
        return ScriptReport(launch.script, (Judgement(1, Verdict.UNKNOWN, f"one process {why}"),))
    return ScriptReport(launch.script, tuple(_judged(runner, alone, size) for size in sizes))


def _judged(runner: _Runner, alone: WholeRun, size: int) -> Judgement:
    try:
        return _judge(runner, alone, size)
    except _Failed as why:
        return Judgement(size, Verdict.FAIL, str(why), why.compared, why.table)
    except (_Undecided, InvalidArgument) as why:
        return Judgement(size, Verdict.UNKNOWN, str(why))


def _check_alone(runner: _Runner, alone: WholeRun) -> None:
    again = runner.run(1)
    difference = first_difference(alone.quantities, again.quantities, 0.0)
    if difference is not None:
        raise _Undecided(
            f"does not repeat itself: two runs differ, first in {difference}. Seed every generator that the script uses "
            "(torch, numpy, random, the workers of DataLoaders)."
        )
    if alone.rows != again.rows:
        raise _Undecided("does not repeat itself: two runs take other rows of data. Seed what shuffles or draws them.")
    _check_numbers(alone)


def _check_numbers(run: WholeRun) -> None:
    found = [
        f"{name} at step {step}"
        for name, values in run.quantities.items()
        for step, v in enumerate(values)
        if v.isnan().any()
    ]
    if found:
        raise _Undecided(
            f"computes NaN, first in {found[0]}, so that nothing can be compared. Check it with fewer steps."
        )


def _judge(runner: _Runner, alone: WholeRun, size: int) -> Judgement:
    run = runner.run(size, keep_data=True)
    wrong = causes.wrong_in_itself(run)
    if wrong:
        raise _Failed(wrong)
    reference, feed = _reference(runner, alone, run)
    how = "with the same rows at each step" if feed.source is None else f"given the rows of all ranks ({feed.source})"
    _check_start(reference, run)
    for found in run.disagreements:
        if not found.gradient:
            raise _Failed(f"{found}. {causes.of_disagreement(run, found)}", _table(reference, run))
    shared, left_out = _comparable(reference, run)
    _check_trained(shared[1])
    remarks = _compare(runner, *shared, feed)
    sentence = f"{run.steps} steps are those of one process {how}"
    return Judgement(size, Verdict.PASS, sentence, compared_lines(shared[1], left_out, remarks))


def _reference(runner: _Runner, alone: WholeRun, run: WholeRun) -> tuple[WholeRun, Feed]:
    """Return one process that sees the rows of all ranks, step by step, and what it had to be given for that."""
    if not all(any(ranks) for ranks in run.rows):
        raise _Undecided("the model's forward is given no tensor with rows, so that nobody knows what data it sees.")
    if _same_data(alone, run):
        return alone, Feed()
    feed = feed_of([rank.taken for rank in run.ranks], alone.forwards(), run.forwards())
    if feed.source is None:
        raise _Undecided(
            "each rank takes rows of its own, and neither a DataLoader nor the arguments of forward determine the loss. "
            "Mark the line where the script takes its batch: `x, y = fsdp_testing.batch(x, y)`."
        )
    fed = runner.run(1, feed=feed)
    if not _same_data(fed, run):
        raise _Undecided(
            f"one process was given the rows of all ranks ({feed.source}), and trained on others or in other steps. Mark "
            "the line where the script takes its batch: `x, y = fsdp_testing.batch(x, y)`."
        )
    _check_numbers(fed)
    return fed, feed


def _same_data(one: WholeRun, run: WholeRun) -> bool:
    """Whether both see the same rows at each step; one that ends sooner is a difference of its own."""
    steps = min(one.steps, run.steps)
    return all(one.union(step) == run.union(step) for step in range(steps))


def _check_start(reference: WholeRun, run: WholeRun) -> None:
    before, here = initial(reference), initial(run)
    if {n: v[0].shape for n, v in before.items()} != {n: v[0].shape for n, v in here.items()}:
        odd = sorted({*before} ^ {*here}) or [n for n in before if before[n][0].shape != here[n][0].shape]
        raise _Undecided(
            f"has other parameters than one process, first {odd[0]}. A script whose model depends on the number of ranks "
            "cannot be compared; choose the model by an argument."
        )
    difference = first_difference(before, here, 0.0)
    if difference is not None:
        raise _Undecided(
            f"starts from other weights than one process: {difference}. Make the model from a seed that does not depend on "
            "the number of ranks."
        )
    if reference.steps != run.steps:
        raise _Failed(
            f"makes {run.steps} steps of the optimizer where one process makes {reference.steps}. Cause: the number of steps "
            "depends on the number of ranks (an early stop, or the length of a rank's data)."
        )


def _comparable(reference: WholeRun, run: WholeRun) -> tuple[tuple[WholeRun, WholeRun], list[str]]:
    """Return both runs with what both have and ranks agree on, and say what was left out and why."""
    names, left = comparable(reference.quantities, run.quantities, ROUNDINGS)
    if run.disagreements:
        left.append("gradients: ranks have their own when the optimizer steps, and yet agree on parameters")
        names = [name for name in names if not name.startswith(GRADIENT)]

    def reduced(one: WholeRun) -> WholeRun:
        return replace(one, quantities=only(one.quantities, names))

    return (reduced(reference), reduced(run)), left


def _table(reference: WholeRun, run: WholeRun) -> tuple[str, ...]:
    return loss_table(reference.quantities, run.quantities, reference.size, run.size)


def _check_trained(run: WholeRun) -> None:
    """Zeros are equal whatever they came from: a pass takes a gradient that is none."""
    gradients = [value for name, values in run.quantities.items() if name.startswith(GRADIENT) for value in values]
    before = initial(run)
    changed = any(
        not torch.equal(values[-1], before[name][0])
        for name, values in run.quantities.items()
        if name.startswith(PARAMETER) and name in before
    )
    if not (changed or any(bool(gradient.any()) for gradient in gradients)):
        raise _Undecided(
            "trains nothing that can be seen: gradients are zero and no parameter changes. Compare more steps."
        )


def _compare(runner: _Runner, reference: WholeRun, run: WholeRun, feed: Feed) -> tuple[str, ...]:
    """Compare all quantities, and return remarks on what remains undecided."""
    found = first_difference(reference.quantities, run.quantities, ROUNDINGS)
    if found is None:
        return ()
    decided = Decided()
    if found.error is not None:
        again = only(runner.run(run.size).quantities, run.quantities)
        repeated = first_difference(run.quantities, again, 0.0)
        if repeated is not None:
            raise _Undecided(f"does not repeat itself: two runs differ, first in {repeated}.")

        def disturbed(seed: int) -> list[tuple[Quantities, Quantities]]:
            moved = runner.run(1, feed=feed, seed=seed), runner.run(run.size, seed=seed)
            return [(here.quantities, there.quantities) for here, there in zip((reference, run), moved)]

        found = beyond_roundings(reference.quantities, run.quantities, ROUNDINGS, disturbed, decided)
    if found is not None:
        cause = causes.of_difference(reference, run, found)
        if any(seen.drew for rank in run.ranks for seen in rank.steps[: found.step + 1]):
            raise _Undecided(
                f"differs from one process, {found}, and forward draws random numbers, which cannot be the same for other shares "
                "of the data. Draw them outside forward, or switch them off for this check."
            )
        raise _Failed(f"differs from one process: {found}. {cause}", _table(reference, run))
    if not decided.enough:
        raise _Undecided(
            "roundings alone move most of what is compared as far as it differs. Compare fewer steps (--steps), or in float32."
        )
    return tuple(
        f"not decided: {sentence}, as far as roundings alone move them" for _, sentence in decided.open.values()
    )


@dataclass(frozen=True, slots=True)
class _Runner:
    launch: Launch
    pool: Pool

    def run(self, size: int, *, keep_data: bool = False, feed: Feed | None = None, seed: int = 0) -> WholeRun:
        """Run the script on new ranks, in a folder that is removed afterwards.

        Raises:
            _Undecided: It did not come to an optimizer step.
            _Failed: Ranks hung, disagreed about collectives, or made different numbers of steps.
        """
        launch = self.launch
        script = launch.script if launch.is_module else str(Path(launch.script).resolve())
        folder = Path(self.pool.shared_directory("fsdp-verify-train-"))
        try:
            show_files(Path.cwd(), folder)
            job = ScriptRun(
                script, launch.arguments, launch.is_module, launch.steps, str(folder), seed, keep_data, feed or Feed()
            )
            world = self.pool.world(size, launch.backend, launch.isolation)
            try:
                outcome = world.execute(run_here, (job,), timeout=launch.timeout, name=launch.script)
            finally:
                world.release()
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if not outcome.ok:
            raise _ending(outcome)
        return _put_together(size, outcome.values)


def _put_together(size: int, ranks: list[RankReport]) -> WholeRun:
    counts = [len(rank.steps) for rank in ranks]
    if not any(counts):
        raise _Undecided(
            "never steps an optimizer of torch.optim after a forward with gradients. Let it train; give it all its arguments."
        )
    if len(set(counts)) > 1:
        raise _Failed(
            f"the ranks make different numbers of optimizer steps: {', '.join(map(str, counts))}. Cause: a rank stops or skips "
            "a step by a number of its own (an early stop on a local value, an uneven number of batches)."
        )
    unreadable = next((seen.unreadable for rank in ranks for seen in rank.steps if seen.unreadable), "")
    if unreadable:
        raise _Undecided(
            f"holds its parameters in a way that cannot be read ({unreadable}). Known are plain tensors, DDP, FSDP1, FSDP2 and "
            "other DTensors without partial placements, and fsdp_ref."
        )
    return whole(size, ranks)


def _ending(outcome: WorldOutcome) -> Exception:
    """Return why a script did not end well: a hang or a mismatch of ranks is a failure, an error of the script is not."""
    several = outcome.size > 1
    if several and outcome.diagnosis is not None and not isinstance(outcome.diagnosis, EndedBadly):
        return _Failed(
            f"{outcome.cause}. Cause: the ranks do not run the same collectives (an early stop on a local value, an uneven "
            "number of batches, a branch that depends on the rank)."
        )
    first = next((rank for rank in outcome.ranks if not rank.good), outcome.ranks[0])
    said = [line.strip() for line in first.stderr.strip().splitlines() if line.strip()]
    last = f" It said last: {said[-1][:300]}" if said else ""
    if first.error is not None and first.error.type_name == "InvalidArgument":
        return _Undecided(f"{first.error.message}.{last} Give the script the arguments it needs after its name.")
    return _Undecided(f"did not end well: {outcome.cause}.{last}")
