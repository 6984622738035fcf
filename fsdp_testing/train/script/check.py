"""Does a training script that nobody changed give on N ranks what one process gives on the data of all ranks?

One process runs the script twice: it must repeat itself. Each world runs it once. Where a world sees the same rows at each
step as one process does, the two runs are compared as they are; otherwise one process runs the script again, given the rows
of the ranks in place of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fsdp_testing.cases.records import Verdict
from fsdp_testing.errors import HarnessError, InvalidArgument
from fsdp_testing.ranks.pool import Pool, default_pool
from fsdp_testing.train.function.comparison import Difference, first_difference
from fsdp_testing.train.function.spans import SUMMED_ROUNDINGS
from fsdp_testing.train.function.whole import BUFFER
from fsdp_testing.train.script import causes
from fsdp_testing.train.script.conventions import BATCH_NORM, CONVENTIONS, SCHEDULER, check_names
from fsdp_testing.train.script.deciding import Pair, check_until, computes_the_same, decide, may_be_given_weights
from fsdp_testing.train.script.feeding import Feed, feeds_of
from fsdp_testing.train.script.parts import doubled, shares_rows, takers, with_parts_in_place
from fsdp_testing.train.script.report import Judgement, ScriptReport
from fsdp_testing.train.script.resuming import judge_resumed
from fsdp_testing.train.script.rows import strange_shares, unknown_shares
from fsdp_testing.train.script.running import STEPS, Failed, Launch, RunListener, Runner, Undecided
from fsdp_testing.train.script.whole import WholeRun, first_steps, initial


class ScriptDiffers(AssertionError):
    """A script trains otherwise on N ranks than in one process; the message names the first difference and step."""


class ScriptUndecided(HarnessError):
    """Nothing can be said of a script on some world size; the message says why and what to do."""


def check_script(
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    world_sizes: Sequence[int] = (2, 3),
    steps: int = STEPS,
    timeout: float = 300.0,
    accept: Sequence[str] = (),
) -> ScriptReport:
    """Run an unmodified training script on worlds of several sizes and compare each with one process.

    Args:
        script: Path of a script that torchrun can start.
        arguments: Its arguments.
        world_sizes: Numbers of ranks; one process is always run.
        steps: Optimizer steps that are compared; then the script is ended.
        timeout: Seconds until a rank counts as hung.
        accept: Conventions by which N ranks are not one process, and that the one process is to follow too:
            "scheduler-per-process", "batch-norm-per-rank", "loss-per-rank".

    Returns:
        What was compared, for each size.

    Raises:
        ScriptDiffers: A world trains otherwise.
        ScriptUndecided: Nothing can be said of a world, or of the script.
        InvalidArgument: There is no such script, or no size above 1.
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
) -> ScriptReport:
    """Judge a script on each world size above 1; a listener is told of each run.

    Raises:
        InvalidArgument: There is no such script, or no size above 1.
    """
    check_names(launch.accept)
    sizes = [size for size in world_sizes if size > 1]
    if not sizes:
        raise InvalidArgument(
            f"world sizes: expected one above 1, got {tuple(world_sizes)}. One process is always run."
        )
    if not launch.is_module and not Path(launch.script).is_file():
        raise InvalidArgument(
            f"script: expected a file, got {launch.script!r}. Correct the path, or use -m for a module."
        )
    if launch.resume_at and launch.resume_at >= launch.steps:
        raise InvalidArgument(
            f"resume-at: expected a step below {launch.steps}, the steps compared, got {launch.resume_at}. Compare more steps."
        )
    runner = Runner(launch, pool or default_pool(), *([listener] if listener is not None else []))
    try:
        alone = runner.run(1)
        again = runner.run(1)
        _check_alone(alone, again)
    except Undecided as why:
        return ScriptReport(launch.script, (Judgement(1, Verdict.UNKNOWN, f"one process {why}", output=why.output),))
    runs = {1: alone}
    remarks = _fixed_files(alone, again) + _downloads(alone)
    judgements = [judged(runner, runs, size) for size in sizes]
    if launch.resume_at:
        judgements += _resumed(runner, runs, judgements)
    return ScriptReport(launch.script, tuple(replace(one, compared=one.compared + remarks) for one in judgements))


def _resumed(runner: Runner, runs: dict[int, WholeRun], judgements: Sequence[Judgement]) -> list[Judgement]:
    """Judge resuming: what is saved on each number of ranks is loaded on as many and on the next number, the last on one."""
    passed = [judgement.size for judgement in judgements if judgement.verdict is Verdict.PASS]
    following = dict(zip(passed, [*passed[1:], 1]))
    return [judge_resumed(runner, runs, size, (size, following[size])) for size in passed]


def judged(runner: Runner, runs: dict[int, WholeRun], size: int) -> Judgement:
    """Judge a script on one number of ranks.

    Args:
        runner: Runs it.
        runs: By number of ranks; that of one process is needed, and that of `size` is added.
        size: Number of ranks.
    """
    try:
        return _judge(runner, runs, size)
    except Failed as why:
        return Judgement(size, Verdict.FAIL, str(why), why.compared, why.table, why.output)
    except Undecided as why:
        return Judgement(size, Verdict.UNKNOWN, str(why), output=why.output)
    except InvalidArgument as why:
        return Judgement(size, Verdict.UNKNOWN, str(why))


def _fixed_files(alone: WholeRun, again: WholeRun) -> tuple[str, ...]:
    """Return a sentence on each file elsewhere that every run writes; names that change are temporary files."""
    same = sorted({*alone.ranks[0].outside} & {*again.ranks[0].outside})
    return tuple(
        f"writes to {path}, outside the current folder: every run replaces it, and it stays. Give the script a relative path."
        for path in same[:5]
    )


def _downloads(alone: WholeRun) -> tuple[str, ...]:
    return tuple(
        f"asks for {host}: every run does so again. Let what it downloads be there before."
        for host in alone.ranks[0].hosts
    )


def _check_alone(alone: WholeRun, again: WholeRun) -> None:
    difference = first_difference(alone.quantities, again.quantities, 0.0)
    if difference is not None:
        raise Undecided(
            f"does not repeat itself: two runs differ, first in {difference}. Seed every generator that the script uses "
            "(torch, numpy, random, the workers of DataLoaders)."
        )
    if alone.rows != again.rows:
        raise Undecided("does not repeat itself: two runs take other rows of data. Seed what shuffles or draws them.")
    _check_numbers(alone)


def _check_numbers(run: WholeRun) -> None:
    found = [
        f"{name} at step {step}"
        for name, values in run.quantities.items()
        for step, v in enumerate(values)
        if v.isnan().any()
    ]
    if found:
        raise Undecided(
            f"computes NaN, first in {found[0]}, so that nothing can be compared. Check it with fewer steps."
        )


def _judge(runner: Runner, runs: dict[int, WholeRun], size: int) -> Judgement:
    alone = runs[1]
    run = runs[size] = with_parts_in_place(alone, runner.run(size, keep_data=True))
    wrong = causes.wrong_in_itself(run)
    times = doubled(run)
    if wrong or times > 1:
        raise Failed(wrong or causes.of_same_rows(run, times))
    _check_shapes(alone, run)
    _check_replicas(run)
    # Ranks that share the work on the same rows take them once.
    taken = run.of(takers(alone, run)) if shares_rows(run) else run
    wrong = strange_shares(alone, taken)
    if wrong:
        raise Failed(wrong)
    pair, how = _pair(runner, alone, run, taken)
    accept = runner.launch.accept
    pair = pair.as_ranks(accept) if accept else pair
    pair, start = _with_same_start(pair)
    _check_ranks(pair)
    compared = _decided(pair) + unknown_shares(alone, taken) + _not_stepped(run) + _not_compared(run, accept)
    return Judgement(size, Verdict.PASS, f"{run.steps} steps are those of one process {how}{start}", compared)


def _decided(pair: Pair) -> tuple[str, ...]:
    """Compare, and return what was compared; what differs by padding alone decides nothing.

    Raises:
        Failed: The world differs.
        Undecided: Nothing can be said.
    """
    try:
        return decide(pair)
    except Failed:
        if not (pair.feed.pads and _same_count(pair.reference, pair.run, 0)):
            raise
    # Judged with batches that are padded together: whatever differs still is no padding.
    alike = with_parts_in_place(pair.reference, pair.runner.run(pair.run.size, feed=pair.feed))
    decide(replace(pair, run=alike, own=pair.feed, kept={}))
    raise Undecided(
        "differs from one process only where rows are padded to another length: with the ranks' batches padded together it "
        "trains as one process does. Mask what is padded in the model and in the loss, or pad to a fixed length."
    )


def _pair(runner: Runner, alone: WholeRun, run: WholeRun, taken: WholeRun) -> tuple[Pair, str]:
    """Return the world beside one process that sees its rows, and in which way it does."""
    try:
        reference, feed = _reference(runner, alone, taken)
    except Undecided:
        # Whatever forward is given: who computes the same gradients at each step has seen the same data.
        pair = Pair(runner, alone, run, Feed())
        if not computes_the_same(pair):
            raise
        return pair, "with other arguments of forward: ranks share the work on each row"
    if feed.source is None and not _same_data(alone, taken):
        return Pair(runner, alone, run, feed), "with the same rows on each rank, of which forward is given parts"
    if feed.source is not None:
        how = f"given the rows of all ranks ({feed})"
    else:
        how = "with the same rows at each step"
    if taken.size < run.size:
        how += f", on which {run.size // taken.size} ranks work together"
    return Pair(runner, reference, run, feed), how


def _check_replicas(run: WholeRun) -> None:
    apart = causes.of_start(run)
    if apart and any(seen.sent for seen in first_steps(run)):
        raise Undecided(
            "each rank has weights of its own by the same names, and they send to one another, as stages of a pipeline do. Draw "
            "the whole model from one seed on every rank, and take the layers of the stage from it: then they are known by their "
            "values."
        )
    if apart:
        raise Failed(apart)


def _check_ranks(pair: Pair) -> None:
    """Compare what the ranks have of the same parameters; what differs from one process before that comes first."""
    run = pair.run
    own = BUFFER if BATCH_NORM in pair.runner.launch.accept else None
    deciding = [found for found in run.disagreements if found.decides and found.kind != own]
    apart = min(deciding, key=lambda found: found.step, default=None)
    if apart is None:
        return
    check_until(pair, apart.step)
    raise Failed(f"{apart}. {causes.of_disagreement(run, apart)}", pair.table)


def _not_stepped(run: WholeRun) -> tuple[str, ...]:
    """Say what an optimizer steps that nobody can read; weights agree.

    Raises:
        Undecided: The gradients of the model were not there to be read either.
    """
    steps = [seen for rank in run.ranks for seen in rank.steps]
    strange = max(seen.strange for seen in steps)
    if not strange:
        return ()
    if not any(seen.given for seen in steps):
        raise Undecided(
            f"the optimizer steps {strange} tensors that are neither parameters of the model nor copies of some, one for one. "
            "The model's weights are those of one process at each step, and of gradients nothing was seen. Leave the model's "
            "gradients there until the step, or give the optimizer one copy of each parameter."
        )
    return (
        f"not compared: the {strange} tensors that the optimizer steps, and its state: they are no parameters of the model",
    )


def _not_compared(run: WholeRun, accept: Sequence[str]) -> tuple[str, ...]:
    off = any(rank.dropout for rank in run.ranks)
    said = ["not compared: dropout, which was switched off, since masks are drawn for a rank's own rows"] if off else []
    for name in accept:
        there = {SCHEDULER: name in run.ranks[0].conventions, BATCH_NORM: run.ranks[0].steps[0].batch_norm}
        said.append(f"accepted: {name}: " + (CONVENTIONS[name] if there.get(name, True) else "not there"))
    return tuple(said)


def _reference(runner: Runner, alone: WholeRun, run: WholeRun) -> tuple[WholeRun, Feed]:
    """Return one process that sees the rows of all ranks, step by step, and what it had to be given for that."""
    if not any(any(ranks) for ranks in run.rows):
        raise Undecided("the model's forward is given no tensor with rows, so that nobody knows what data it sees.")
    if _same_data(alone, run) or _same_source(alone, run):
        return alone, Feed()
    feeds = feeds_of([rank.taken for rank in run.ranks], alone.forwards(), run.forwards())
    tried = []
    for feed in feeds:
        fed = runner.run(1, feed=feed)
        if _same_data(fed, run) or (feed.pads and _same_moments(fed, run)):
            _check_numbers(fed)
            return fed, feed
        tried.append(f"{feed.source}")
    if not tried:
        raise Undecided(
            "each rank takes rows of its own, and neither a DataLoader nor the arguments of forward determine the loss. "
            "Mark the line where the script takes its batch: `x, y = fsdp_testing.batch(x, y)`."
        )
    raise Undecided(
        f"one process was given the rows of all ranks ({', then '.join(tried)}), and trained on others or in other steps: random "
        "numbers that are drawn between there and forward (an augmentation in the loop) cannot be replayed. Mark the line where "
        "the script has its batch ready: `x, y = fsdp_testing.batch(x, y)`."
    )


def _same_moments(one: WholeRun, run: WholeRun) -> bool:
    """Whether both made as many forwards until each step, after as many items of their loaders.

    Rows that are padded to the longest of another batch have other digests. There are as many of them, unless each batch is
    packed into one row.
    """
    for step in range(min(one.steps, run.steps)):
        mine, others = one.ranks[0], run.ranks
        if any(len(mine.steps[step].rows) != len(rank.steps[step].rows) for rank in others):
            return False
        if any(mine.taken.items[step] != rank.taken.items[step] for rank in others):
            return False
        forwards = [len(forward) for seen in (mine, *others) for forward in seen.steps[step].rows]
        if not _same_count(one, run, step) and {*forwards} != {1}:
            return False
    return True


def _same_source(alone: WholeRun, run: WholeRun) -> bool:
    """Whether all ranks take the rows of one process, though forward is given parts of them, as slices of sequences."""
    sources = [rank.taken.rows for rank in (*alone.ranks, *run.ranks)]
    known = min(map(len, sources))
    return known > 0 and all(rows[:known] == sources[0][:known] for rows in sources)


def _same_count(one: WholeRun, run: WholeRun, step: int) -> bool:
    return one.union(step).total() == run.union(step).total()


def _same_data(one: WholeRun, run: WholeRun) -> bool:
    """Whether both see the same rows at each step; one that ends sooner is a difference of its own."""
    steps = min(one.steps, run.steps)
    return all(one.union(step) == run.union(step) for step in range(steps))


def _check_shapes(alone: WholeRun, run: WholeRun) -> None:
    before, here = initial(alone), initial(run)
    if {n: v[0].shape for n, v in before.items()} != {n: v[0].shape for n, v in here.items()}:
        odd = sorted({*before} ^ {*here}) or [n for n in before if before[n][0].shape != here[n][0].shape]
        raise Undecided(
            f"has other parameters than one process, first {odd[0]}. A script whose model depends on the number of ranks "
            "cannot be compared; choose the model by an argument. Where each rank has a part of the model, which is known by its "
            "values: draw the whole from one seed on every rank, and take the part of that."
        )


def _with_same_start(pair: Pair) -> tuple[Pair, str]:
    """Return the world beside one process that begins with its weights, and words on that where it had to be given them."""
    reference, run = pair.reference, pair.run
    if reference.steps != run.steps:
        raise Failed(
            f"makes {run.steps} steps of the optimizer where one process makes {reference.steps}. Cause: the number of steps "
            "depends on the number of ranks (an early stop, or the length of a rank's data)."
        )
    difference = _other_start(reference, run)
    if difference is None:
        return pair, ""
    other = f"starts from other weights than one process: {difference}. {causes.of_other_start(reference, run)}"
    if not may_be_given_weights(run):
        raise Undecided(other)
    given = pair.with_weights()
    if given.reference.steps != run.steps or _other_start(given.reference, run) is not None:
        raise Undecided(other)
    return given, ". It was given the weights with which the ranks begin, which are not those that it draws"


def _other_start(reference: WholeRun, run: WholeRun) -> Difference | None:
    sums = any(span.block > 1 for spans in first_steps(run)[0].before.values() for span in spans)
    return first_difference(initial(reference), initial(run), SUMMED_ROUNDINGS if sums else 0.0)
