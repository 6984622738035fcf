"""Checks that a script that is stopped and restarted, on other numbers of ranks too, continues as if it had not been stopped.

It is stopped right before a step, so that it can save after the step before. It is restarted with the same arguments (and those
that make it load) in a copy of its folder. Its state at the start is compared with its state when stopped; later steps are
compared with those of the uninterrupted run, if their rows are the same.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fsdp_testing.cases.records import Verdict
from fsdp_testing.train.check import check_disagreements
from fsdp_testing.train.comparable import vanishing
from fsdp_testing.train.comparison import CLEAR_ROUNDINGS, Decided, difference_of, first_difference
from fsdp_testing.train.on_rank import RunSettings
from fsdp_testing.train.pair import Pair
from fsdp_testing.train.quantities import Kind, Quantities, Quantity
from fsdp_testing.train.report import Judgement
from fsdp_testing.train.running import Failed, Runner, Undecided
from fsdp_testing.train.spans import SUMMED_ROUNDINGS
from fsdp_testing.train.surroundings import show_files
from fsdp_testing.train.whole import WholeRun, initial, initial_state, together


def judge_resumed(runner: Runner, runs: Mapping[int, WholeRun], size: int, others: tuple[int, ...]) -> Judgement:
    """Stop a script on `size` ranks and go on with each of `others`."""
    at, name = runner.start.resume_at, f"--resume-at {runner.start.resume_at}"
    folder = Path(runner.pool.shared_directory("fsdp-verify-resume-"))
    compared = []
    try:
        _stop(runner, size, folder / "0")
        for number, other in enumerate(others, start=1):
            shutil.copytree(folder / "0", folder / str(number), symlinks=True)
            place, at_least = folder / str(number), runner.start.resume_at
            same = compare_resumed(runner, runs, (size, other), place, stopped=at_least)
            compared.append(f"on {other} ranks ({same})")
    except Failed as why:
        sentence = f"stopped before step {at} and {runner.start.sentence(size, why)}"
        return Judgement(size, Verdict.FAIL, sentence, table=why.table, relation=name, first=why.first)
    except Undecided as why:
        return Judgement(size, Verdict.UNKNOWN, f"stopped before step {at} and resumed: {why}", relation=name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sentence = f"stopped before step {at}, it continues like the run that was not stopped: {', '.join(compared)}"
    return Judgement(size, Verdict.PASS, sentence, relation=name, steps=runs[size].steps)


def _stop(runner: Runner, size: int, folder: Path) -> None:
    """Run the script until it is stopped.

    Raises:
        Undecided: It ends earlier, or writes nothing.
    """
    folder.mkdir()
    show_files(Path.cwd(), folder)
    at = runner.start.resume_at
    stopped = runner.run(size, RunSettings(folder=str(folder), stop_before=at))
    if stopped.steps < at:
        raise Undecided(f"the script ends after {stopped.steps} steps. Stop it earlier (--resume-at).")
    if not files_below(folder):
        raise Undecided(
            f"the script has saved nothing below its folder before step {at}. Let it save earlier, to a relative path."
        )


def files_below(folder: Path) -> list[str]:
    """Return the names of the files that a run wrote."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and not p.is_symlink())


def compare_resumed(
    runner: Runner, runs: Mapping[int, WholeRun], sizes: tuple[int, int], folder: Path, *, stopped: int
) -> str:
    """Compare a resumed run with the uninterrupted one, and return what was compared.

    Args:
        runner: Runs it.
        runs: The uninterrupted runs, by number of ranks.
        sizes: Ranks of the stopped run, and of the resumed run.
        folder: The folder it wrote to.
        stopped: Steps made at least before it was stopped.

    Raises:
        Failed: It continues differently.
        Undecided: It did not load its saved state.
    """
    uninterrupted, same_size = runs[sizes[0]], runs[sizes[1]]
    steps, arguments = max(runner.start.steps - stopped, 1), runner.start.resume_arguments
    settings = RunSettings(folder=str(folder), steps=steps, arguments=arguments)
    resumed = runner.run(sizes[1], settings)
    where = f"resumed on {sizes[1]} ranks"
    at = _place(uninterrupted, resumed)
    if at is None:
        files = ", ".join(files_below(folder)[:5])
        raise Undecided(
            f"{where} it begins with the weights of step 0, though it had saved {files}. Give it the arguments with which it "
            "loads that (--resume-args), by a relative path."
        )
    _check_begin(uninterrupted, resumed, at, where)
    check_disagreements(Pair(runner, resumed, resumed))
    steps = min(resumed.steps, uninterrupted.steps - at)
    if not steps:
        raise Undecided(f"{where} it begins after the last step compared. Compare more steps (--steps).")
    expected = [[run.union(step) for step in range(run.steps)] for run in (uninterrupted, same_size)]
    taken = [resumed.union(step) for step in range(steps)]
    if expected[0] != expected[1]:
        if steps and taken[0] == expected[1][0] and expected[1][0] not in expected[1][1:]:
            raise Failed(f"{where} it takes the rows of step 0 again. {_ORDER}")
        return "weights, optimizer's state and settings; its steps take other rows than they did"
    _check_rows(expected[0], taken, at, where)
    reference, other = _from(same_size, at, steps), _from(resumed, 0, steps)
    aligned = at + resumed.steps == uninterrupted.steps == same_size.steps
    names = [key for key in other if key in reference and (aligned or key.kind is not Kind.COPY)]
    due, given = {key: reference[key] for key in names}, {key: other[key] for key in names}

    def disturbed(seed: int) -> list[tuple[Quantities, Quantities]]:
        moved = _from(runner.disturbed(sizes[1], seed), at, steps)
        return [(due, {key: moved[key] for key in names if key in moved})]

    decided = Decided(excused=vanishing((due, given), 0.0))
    difference = difference_of(due, given, disturbed, decided, initial(resumed))
    if difference is not None:
        raise Failed(
            f"{where} it continues differently, counted from step {at}: {difference}. {_cause(difference.quantity)}",
            first=replace(difference, step=at + difference.step),
        )
    if not decided.enough:
        keys = ", ".join(map(str, decided.unknown[:5])) or "what is compared"
        raise Undecided(
            f"{where} rounding alone moves most of {keys} as far as the resumed run does. Compare fewer steps (--steps)."
        )
    return f"weights, optimizer's state and settings, rows, and {steps} steps"


def _place(uninterrupted: WholeRun, resumed: WholeRun) -> int | None:
    """Return after how many steps of the uninterrupted run its weights equal the resumed run's first weights.

    None if they are the initial weights. If they match no step, the step before which it was stopped.
    """
    before = initial(resumed)
    for step in reversed(range(uninterrupted.steps)):
        after = {key: [uninterrupted.quantities[key][step]] for key in before if key in uninterrupted.quantities}
        if after and first_difference(after, {key: before[key] for key in after}, SUMMED_ROUNDINGS) is None:
            return step + 1
    if first_difference(initial(uninterrupted), before, SUMMED_ROUNDINGS) is None:
        return None
    raise Failed(
        "resumed, it begins with weights that no step had. Cause: it does not save the weights that it trains."
    )


def _check_begin(uninterrupted: WholeRun, resumed: WholeRun, at: int, where: str) -> None:
    """Compare the optimizer's state and settings of the first step with those of the uninterrupted run."""
    begun, _ = together([[rank.steps[0]] for rank in resumed.ranks])
    states = {key: uninterrupted.quantities[key][at - 1] for key in uninterrupted.names(Kind.MOMENT)}
    kept = {key: [value] for key, value in states.items() if value.numel()}
    state = initial_state(resumed)
    missing = [key for key in kept if key not in state]
    if missing:
        raise Failed(
            f"{where} the optimizer begins without state: {len(missing)} tensors, first {missing[0]}. {_STATE}"
        )
    difference = first_difference(kept, {key: state[key] for key in kept}, SUMMED_ROUNDINGS)
    if difference is not None:
        raise Failed(f"{where} the optimizer begins with another state: {difference}. {_STATE}")
    if at >= uninterrupted.steps:
        return
    settings = [
        key for key in begun if key.kind in _SET and len(uninterrupted.quantities.get(key, ())) == uninterrupted.steps
    ]
    due = {key: [uninterrupted.quantities[key][at]] for key in settings}
    difference = first_difference(due, {key: begun[key] for key in settings}, CLEAR_ROUNDINGS)
    if difference is not None:
        raise Failed(f"{where} step {at} has another setting: {difference}. {_cause(difference.quantity)}")


def _check_rows(expected: list[Counter[str]], taken: list[Counter[str]], at: int, where: str) -> None:
    for step, rows in enumerate(taken):
        if rows == expected[at + step]:
            continue
        if step == 0 and rows == expected[0]:
            raise Failed(f"{where} step {at} takes the rows of step 0 again. {_ORDER}")
        raise Failed(f"{where} step {at + step} takes different rows than it did. {_ORDER}")


def _from(run: WholeRun, first: int, steps: int) -> Quantities:
    """Return the quantities of `steps` steps of a run from the `first` on, and its final copies of weights."""
    apart = {odd.kind for odd in run.disagreements}
    return {
        key: values if key.kind is Kind.COPY else values[first : first + steps]
        for key, values in run.quantities.items()
        if key.kind not in apart and (key.kind is Kind.COPY or len(values) == run.steps)
    }


def _cause(quantity: Quantity) -> str:
    if quantity.kind in _SET:
        return "Cause: the schedule is not saved, or not loaded. Save scheduler.state_dict() beside the optimizer's."
    if quantity.kind is Kind.COPY:
        return "Cause: this copy of the weights is not saved, or not loaded."
    if quantity.kind in (Kind.GRADIENT, Kind.PARAMETER, Kind.MOMENT, Kind.LOSS):
        return "Rows, weights and optimizer's state with which it begins are right: look for random numbers, or a count of steps."
    return "Cause: it is not saved, or not loaded."


_SET = (Kind.RATE, Kind.SETTING)
_ORDER = (
    "Cause: the order of the data starts over. Save how many batches were taken (and epoch or generator's state), "
    "and skip them, or let the sampler begin there."
)
_STATE = "Cause: the optimizer's state is not saved, or not loaded. Save optimizer.state_dict() beside the model's."
