"""Does a script that is stopped and started again, on another number of ranks too, go on as if it had not been?

It is stopped right before a step, so that what it saves after the step before is saved. It is started again with the same
arguments (and those that make it load) in a copy of the folder that it wrote to. What it begins with is compared with what it
was stopped with; the steps that follow with those of the run that was not stopped, where their rows are the same.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from fsdp_testing.cases.records import Verdict
from fsdp_testing.train.function.comparison import (
    CLEAR_ROUNDINGS,
    ROUNDINGS,
    Decided,
    Quantities,
    beyond_roundings,
    first_difference,
)
from fsdp_testing.train.function.spans import SUMMED_ROUNDINGS
from fsdp_testing.train.function.whole import GRADIENT, MOMENT, PARAMETER, RATE, SETTING, together, vanishing
from fsdp_testing.train.script.report import Judgement
from fsdp_testing.train.script.running import Failed, Runner, Stay, Undecided
from fsdp_testing.train.script.surroundings import show_files
from fsdp_testing.train.script.whole import COPY, WholeRun, initial, initial_state


def judge_resumed(runner: Runner, runs: Mapping[int, WholeRun], size: int, others: tuple[int, ...]) -> Judgement:
    """Stop a script on `size` ranks and go on with each of `others`.

    Args:
        runner: Runs it; its launch says before which step to stop.
        runs: By number of ranks, those that were not stopped.
        size: Ranks of the run that is stopped.
        others: Numbers of ranks on which it goes on.
    """
    at = runner.launch.resume_at
    folder = Path(runner.pool.shared_directory("fsdp-verify-resume-"))
    said = []
    try:
        saved = _stop(runner, size, folder / "0")
        for number, other in enumerate(others, start=1):
            shutil.copytree(folder / "0", folder / str(number), symlinks=True)
            stay = Stay(
                folder / str(number), steps=max(runner.launch.steps - at, 1), arguments=runner.launch.resume_arguments
            )
            said.append(f"on {other} ranks ({_compare(runner, runs, (size, other), stay, saved)})")
    except Failed as why:
        return Judgement(size, Verdict.FAIL, f"stopped before step {at} and {why}", table=why.table)
    except Undecided as why:
        return Judgement(size, Verdict.UNKNOWN, f"stopped before step {at} and resumed: {why}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Judgement(
        size, Verdict.PASS, f"stopped before step {at}, it goes on as the run that was not: {', '.join(said)}"
    )


def _stop(runner: Runner, size: int, folder: Path) -> list[str]:
    """Run the script until it is stopped, and return the names of the files that it wrote."""
    folder.mkdir()
    show_files(Path.cwd(), folder)
    at = runner.launch.resume_at
    stopped = runner.run(size, stay=Stay(folder, stop_before=at))
    saved = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and not p.is_symlink())
    if stopped.steps < at:
        raise Undecided(f"the script ends after {stopped.steps} steps. Stop it earlier (--resume-at).")
    if not saved:
        raise Undecided(
            f"the script has saved nothing below its folder before step {at}. Let it save earlier, to a relative path."
        )
    return saved


def _compare(runner: Runner, runs: Mapping[int, WholeRun], sizes: tuple[int, int], stay: Stay, saved: list[str]) -> str:
    """Compare a resumed run with that which was not stopped, and return what was compared.

    Raises:
        Failed: It goes on otherwise.
        Undecided: It did not load what it had saved.
    """
    whole, same_size = runs[sizes[0]], runs[sizes[1]]
    resumed = runner.run(sizes[1], stay=stay)
    where = f"resumed on {sizes[1]} ranks"
    at = _place(whole, resumed)
    if at is None:
        files = ", ".join(saved[:5])
        raise Undecided(
            f"{where} it begins with the weights of step 0, though it had saved {files}. Give it the arguments with which it "
            "loads that (--resume-args), by a relative path."
        )
    _check_begin(whole, resumed, at, where)
    steps = min(resumed.steps, whole.steps - at)
    expected = [[one.union(step) for step in range(one.steps)] for one in (whole, same_size)]
    taken = [resumed.union(step) for step in range(steps)]
    if expected[0] != expected[1]:
        if steps and taken[0] == expected[1][0] and expected[1][0] not in expected[1][1:]:
            raise Failed(f"{where} it takes the rows of step 0 again. {_ORDER}")
        return "weights, optimizer's state and settings; its steps take other rows than they did"
    _check_rows(expected[0], taken, at, where)
    reference, other = _from(same_size, at, steps), _from(resumed, 0, steps)
    aligned = at + resumed.steps == whole.steps == same_size.steps
    names = [name for name in other if name in reference and (aligned or not name.startswith(COPY))]
    pair, start = ({n: reference[n] for n in names}, {n: other[n] for n in names}), initial(resumed)
    decided = Decided(excused={*vanishing(pair, 0.0)})
    found = beyond = first_difference(*pair, ROUNDINGS, None, decided, start)
    if found is not None and found.error is not None:
        decided = Decided(excused=decided.excused)

        def disturbed(seed: int) -> list[tuple[Quantities, Quantities]]:
            moved = _from(runner.run(sizes[1], seed=seed), at, steps)
            return [({n: reference[n] for n in names}, {n: moved[n] for n in names if n in moved})]

        beyond = beyond_roundings(*pair, ROUNDINGS, disturbed, decided, start)
    if beyond is not None:
        raise Failed(f"{where} it goes on otherwise, counted from step {at}: {beyond}. {_cause(beyond.quantity)}")
    if not decided.enough:
        what = ", ".join(decided.unknown[:5]) or "what is compared"
        raise Undecided(
            f"{where} roundings alone move most of {what} as far as it differs. Compare fewer steps (--steps)."
        )
    return f"weights, optimizer's state and settings, rows, and {steps} steps"


def _place(whole: WholeRun, resumed: WholeRun) -> int | None:
    """Return after how many steps of the whole run the weights are those with which the resumed run begins.

    None where they are those of the start. Where they are those of no step, the step before which it was stopped.
    """
    before = initial(resumed)
    for step in reversed(range(whole.steps)):
        after = {name: [whole.quantities[name][step]] for name in before if name in whole.quantities}
        if after and first_difference(after, {name: before[name] for name in after}, SUMMED_ROUNDINGS) is None:
            return step + 1
    if first_difference(initial(whole), before, SUMMED_ROUNDINGS) is None:
        return None
    raise Failed(
        "resumed it begins with weights that it had after no step. Cause: what it saves is not what it trained."
    )


def _check_begin(whole: WholeRun, resumed: WholeRun, at: int, where: str) -> None:
    """Compare optimizer's state and settings of the first step with those of the run that was not stopped."""
    begun, _ = together([[rank.steps[0]] for rank in resumed.ranks])
    kept = {
        name: [values[at - 1]]
        for name, values in whole.quantities.items()
        if name.startswith(MOMENT) and values[at - 1].numel()
    }
    found = initial_state(resumed)
    missing = [name for name in kept if name not in found]
    if missing:
        raise Failed(
            f"{where} the optimizer begins without state: {len(missing)} tensors, first {missing[0]}. {_STATE}"
        )
    difference = first_difference(kept, {name: found[name] for name in kept}, SUMMED_ROUNDINGS)
    if difference is not None:
        raise Failed(f"{where} the optimizer begins with another state: {difference}. {_STATE}")
    if at >= whole.steps:
        return
    settings = [n for n in begun if n.startswith((RATE, SETTING)) and len(whole.quantities.get(n, ())) == whole.steps]
    due = {name: [whole.quantities[name][at]] for name in settings}
    difference = first_difference(due, {name: begun[name] for name in settings}, CLEAR_ROUNDINGS)
    if difference is not None:
        raise Failed(f"{where} step {at} has another setting: {difference}. {_cause(difference.quantity)}")


def _check_rows(expected: list[Counter[str]], taken: list[Counter[str]], at: int, where: str) -> None:
    for step, rows in enumerate(taken):
        if rows == expected[at + step]:
            continue
        if step == 0 and rows == expected[0]:
            raise Failed(f"{where} step {at} takes the rows of step 0 again. {_ORDER}")
        raise Failed(f"{where} step {at + step} takes other rows than it did. {_ORDER}")


def _from(run: WholeRun, first: int, steps: int) -> Quantities:
    """Return what a run computed in `steps` steps from the `first` on, and the copies of weights that it ended with."""
    found = {n: v[first : first + steps] for n, v in run.quantities.items() if len(v) == run.steps}
    copies = {name: values for name, values in run.quantities.items() if name.startswith(COPY)}
    apart = [one.kind for one in run.disagreements]
    return {name: values for name, values in (found | copies).items() if not name.startswith(tuple(apart))}


def _cause(quantity: str) -> str:
    if quantity.startswith((RATE, SETTING)):
        return "Cause: the schedule is not saved, or not loaded. Save scheduler.state_dict() beside the optimizer's."
    if quantity.startswith(COPY):
        return "Cause: this copy of the weights is not saved, or not loaded."
    if quantity.startswith((GRADIENT, PARAMETER, MOMENT)) or quantity == "loss":
        return "Rows, weights and optimizer's state with which it begins are right: look for random numbers, or a count of steps."
    return "Cause: it is not saved, or not loaded."


_ORDER = (
    "Cause: the order of the data begins anew. Save how many batches were taken (and epoch or generator's state), and skip "
    "them, or let the sampler begin there."
)
_STATE = "Cause: the optimizer's state is not saved, or not loaded. Save optimizer.state_dict() beside the model's."
