"""Judges a training on a number of ranks: one examined run beside one reference world, however it is started.

The reference world runs twice and must repeat itself. Each other world runs once. Scripts choose their own rows. If a world sees
the same rows at each step as one process does, the two runs are compared directly; otherwise one process runs the script again
on the rows of the ranks. Functions and models take the same global rows on every world.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from fsdp_testing.cases.records import Verdict
from fsdp_testing.errors import InvalidArgument
from fsdp_testing.train import causes, starts
from fsdp_testing.train.by_batches import (
    OtherRows,
    constant_divisor,
    decided_by_batches,
    final_verdict,
    more_micro_batches,
    same_data,
    same_moments,
    with_scaled_losses,
)
from fsdp_testing.train.comparable import only
from fsdp_testing.train.comparison import first_difference
from fsdp_testing.train.conventions import BATCH_NORM, CONVENTIONS, LOSS, SCHEDULER, to_follow
from fsdp_testing.train.deciding import Compared, decide
from fsdp_testing.train.feed import Feed, feeds_of
from fsdp_testing.train.nan import check_numbers, check_waits, returned
from fsdp_testing.train.on_rank import RunSettings
from fsdp_testing.train.pair import (
    Pair,
    check_repeats,
    check_until,
    computes_the_same,
    may_be_given_weights,
    other_start,
)
from fsdp_testing.train.parts import doubled, loading, shares_rows, takers, with_parts_in_place
from fsdp_testing.train.quantities import Kind
from fsdp_testing.train.report import Judgement
from fsdp_testing.train.rows import prepared_apart, strange_shares, taken_elsewhere, unknown_shares
from fsdp_testing.train.running import Failed, NotEnded, Runner, Undecided
from fsdp_testing.train.whole import WholeRun, first_steps, initial, outdated_in_use, own_parts, whole


def run_alone(runner: Runner, size: int) -> tuple[WholeRun, WholeRun]:
    """Return two runs of the reference world, which repeat themselves.

    Raises:
        Failed, Undecided: They do not repeat themselves, or contain NaN.
    """
    alone = runner.run(size)
    check_numbers(runner, alone)
    again = runner.run(size)
    check_repeats(runner, alone, again)
    if alone.rows != again.rows:
        raise Undecided(
            "does not repeat itself: two runs take different rows of data. Seed what shuffles or draws them."
        )
    check_ranks(runner, alone, alone)
    return alone, again


def judged(runner: Runner, runs: dict[int, WholeRun], size: int) -> Judgement:
    """Judge a training on one number of ranks.

    Args:
        runner: Runs it.
        runs: By number of ranks; the first is that of the reference world, and that of `size` is added.
        size: Number of ranks.

    Raises:
        WorldFailed: A rank of a function raised or died, or hung twice.
        InvalidArgument: A function or a model is not one.
    """
    judge = _judge_with_rows if runner.start.takes_rows else _judge
    return guarded(runner, size, lambda: judge(runner, runs, size))


def guarded(runner: Runner, size: int, judge: Callable[[], Judgement]) -> Judgement:
    """Return a judgement, also for a run that ended early or hung once."""
    start = runner.start
    runner.unsteady.clear()
    try:
        judgement = judge()
    except Failed as why:
        sentence = start.sentence(size, why)
        return Judgement(size, Verdict.FAIL, sentence, table=why.table, output=why.output, first=why.first)
    except Undecided as why:
        return Judgement(size, Verdict.UNKNOWN, start.sentence(size, why), output=why.output)
    except InvalidArgument as why:
        if not start.takes_rows:
            raise
        return Judgement(size, Verdict.UNKNOWN, str(why))
    unsteady = " ".join(runner.unsteady)
    return replace(judgement, verdict=Verdict.UNKNOWN, sentence=unsteady) if unsteady else judgement


def _judge(runner: Runner, runs: dict[int, WholeRun], size: int) -> Judgement:
    """Judge a training that takes the same rows on every world."""
    alone, start = next(iter(runs.values())), runner.start
    run = runner.run(size)
    check_waits(runner, run)
    # In this project's own training of a model all ranks begin alike, so differences are not parts of the model.
    run = with_parts_in_place(alone, run) if start.returns and alone.size == 1 else run
    own = own_parts(run.ranks, alone) if start.returns and not run.parts else ()
    run = runs[size] = whole(size, run.ranks, own) if own else run
    check_ranks(runner, run, alone)
    pair = Pair(runner, alone, run)
    pair = pair.as_ranks(to_follow(start.accept)) if to_follow(start.accept) else pair
    check_disagreements(pair)
    compared = decide(pair)
    sentence = f"{run.steps} steps match those of {start.world(alone.size)}"
    lines = (*compared.lines, *unread(run))
    return Judgement(size, Verdict.PASS, sentence, lines, compared.unknown, steps=run.steps)


def check_ranks(runner: Runner, run: WholeRun, reference: WholeRun) -> None:
    """Compare to the bit what the ranks of one world return, and in the reference world what they hold.

    Raises:
        Failed: They differ.
    """
    first = run.ranks[0].returned
    for rank, report in enumerate(run.ranks[1:], start=1):
        difference = first_difference(returned(first), returned(report.returned), 0.0)
        if difference is not None:
            cause = causes.of_returned(run, reference, difference)
            raise Failed(f"differs from rank 0: {difference}. {cause}", subject=f"rank {rank}")
    if run is reference:
        check_disagreements(Pair(runner, reference, run))


def check_disagreements(pair: Pair, kinds: Sequence[Kind] = tuple(Kind)) -> None:
    """Compare the ranks' values of the same parameters; an earlier difference from the reference is reported first."""
    run = pair.run
    own = Kind.BUFFER if BATCH_NORM in pair.runner.start.accept else None
    deciding = [odd for odd in run.disagreements if odd.decides and odd.kind is not own and odd.kind in kinds]
    odd = min(deciding, key=lambda odd: odd.moment, default=None)
    if odd is None:
        return
    if run is not pair.reference:
        check_until(pair, int(min(odd.moment, run.steps)))
    if odd.kind is Kind.BUFFER:
        pair.agrees_apart(lambda world: only(world.quantities, run.names(Kind.GRADIENT, Kind.PARAMETER)))
    table = pair.table if run is not pair.reference else ()
    raise Failed(f"do not hold the same: {odd}. {causes.of_disagreement(run, odd)}", table, subject="ranks")


def _judge_with_rows(runner: Runner, runs: dict[int, WholeRun], size: int) -> Judgement:
    """Judge a script, whose ranks choose their own rows."""
    alone = runs[1]
    seen = runner.run(size, RunSettings(keep_data=True))
    check_waits(runner, seen)
    run = runs[size] = with_parts_in_place(alone, seen)
    if lacking := starts.nowhere(alone, run):
        raise Failed(lacking)
    check_waits(runner, run)
    wrong, times = causes.wrong_in_itself(run, runner.start.accept), doubled(run)
    if wrong or times > 1:
        raise Failed(wrong or causes.of_same_rows(run, times))
    _check_shapes(alone, run)
    _check_replicas(run)
    # Rows on which several ranks share the work count once.
    taking = takers(alone, run) if shares_rows(run) else tuple(range(run.size))
    taken, loaded = (run.of(ranks) if len(ranks) < run.size else run for ranks in (taking, loading(run, taking)))
    wrong = strange_shares(alone, taken, loaded)
    if wrong:
        raise Failed(wrong)
    pair, how, other_rows = _pair(runner, (alone, run), taken, loaded)
    accept = runner.start.accept
    pair = pair.as_ranks(to_follow(accept)) if to_follow(accept) else pair
    how += ", which runs the rows of each rank separately and averages" if {LOSS, BATCH_NORM} & {*accept} else ""
    start = ""
    try:
        pair, start = _with_same_start(pair)
        as_it_is, pair = pair, with_scaled_losses(pair, alone)
        pair, compared = _compared_or_as_it_is(pair, as_it_is)
    except Failed as why:
        itself = Pair(runner, alone, run, Feed())
        if pair.feed.source is None or to_follow(accept) or not computes_the_same(itself):
            raise final_verdict(pair, why, other_rows) from why.__cause__
        # The script marked parts of rows, or a forward that joins ranks got their rows as if they were its own.
        pair, how, other_rows, compared = itself, _SHARED, None, _compared(itself)
    if other_rows is not None:
        raise other_rows
    if odd := taken_elsewhere(alone, taken) or prepared_apart(alone, loaded) or outdated_in_use(run):
        raise Undecided(f"trains as {pair.other} does, but {odd}")
    if pair.feed.scale != 1.0:
        start += _scaled(pair, alone)
    shares = () if how == _SHARED else unknown_shares(alone, loaded)
    lines = compared.lines + shares + not_stepped(run) + not_compared(run, accept)
    sentence = f"{run.steps} steps match those of one process {how}{start}"
    return Judgement(size, Verdict.PASS, sentence, lines, compared.unknown, steps=run.steps)


def _scaled(pair: Pair, alone: WholeRun) -> str:
    """Return why the losses of one process were divided by the number of ranks."""
    counts = more_micro_batches(pair)
    if counts:
        says = f"It makes {counts[0]} micro-batches where a rank makes {counts[1]} and divides by {counts[1]}"
    else:
        by = constant_divisor(pair, alone)
        says = f"It divides sums over its rows by {by:g}, a constant of a rank's batch"
    return f". {says}, so each of its losses was divided by {pair.run.size} more"


def _compared_or_as_it_is(scaled: Pair, pair: Pair) -> tuple[Pair, Compared]:
    """Compare with losses of one process that count as a rank's; or as they are, where ranks sum their gradients."""
    try:
        return scaled, _compared(scaled)
    except Failed:
        if scaled is not pair:
            with suppress(Failed):
                return pair, _compared(pair)
        raise


def _compared(pair: Pair) -> Compared:
    check_disagreements(pair)
    return decided_by_batches(pair)


_SHARED = "with different arguments of forward: ranks share the work on each row"
"""Equal gradients at each step prove equal data, whatever the rows seem to be."""


def _pair(
    runner: Runner, worlds: tuple[WholeRun, WholeRun], taken: WholeRun, loaded: WholeRun
) -> tuple[Pair, str, OtherRows | None]:
    """Return the world beside one process that sees its rows, how that process gets them, and why not to the end."""
    alone, run = worlds
    try:
        reference, feed = _reference(runner, alone, taken, loaded)
    except Undecided as why:
        pair = Pair(runner, alone, run, Feed())
        if computes_the_same(pair):
            return pair, _SHARED, None
        # All ranks began alike, so their present values of the same parameters can be compared without another world.
        check_disagreements(Pair(runner, run, run), (Kind.PARAMETER,))
        if isinstance(why, OtherRows) and why.steps:
            return Pair(runner, why.fed[0], run, why.fed[1]), f"for {why.steps} steps", why
        raise
    if feed.source is None and not same_data(alone, taken):
        return Pair(runner, alone, run, feed), "with the same rows on each rank, of which forward receives parts", None
    if feed.source is not None:
        how = f"given the rows of all ranks ({feed})"
    else:
        how = "with the same rows at each step"
    if taken.size < run.size:
        how += f", on which {run.size // taken.size} ranks work together"
    return Pair(runner, reference, run, feed), how, None


def _check_replicas(run: WholeRun) -> None:
    apart = starts.of_start(run)
    if apart and any(seen.sent for seen in first_steps(run)):
        raise Undecided(
            "each rank has different weights under the same names, and the ranks send to one another, as pipeline "
            "stages do. Draw the whole model from one seed on every rank, and take the layers of the stage from it: then they "
            "are "
            "recognised by their values."
        )
    if apart:
        raise Failed(apart)


def not_stepped(run: WholeRun) -> tuple[str, ...]:
    """Name the unreadable tensors that an optimizer steps although weights agree.

    Raises:
        Undecided: The model's gradients could not be read either.
    """
    strange = max(seen.strange for seen in run.seen)
    if not strange:
        return ()
    if not any(seen.given for seen in run.seen):
        raise Undecided(
            f"the optimizer steps {strange} tensors that are neither parameters of the model nor copies of single ones. The "
            "model's weights equal those of one process at each step, but no gradient was seen. Keep the model's gradients "
            "until the step, or give the optimizer one copy of each parameter."
        )
    return (
        f"not compared: the {strange} tensors that the optimizer steps, and its state: they are no parameters of the model",
    )


def unread(run: WholeRun) -> tuple[str, ...]:
    """Name unreadable quantities other than parameters, which are not compared."""
    left_out = {what: why for seen in run.seen for what, why in seen.left_out.items()}
    return tuple(f"not compared: {what}, which cannot be read ({why})" for what, why in left_out.items())


def not_compared(run: WholeRun, accept: Sequence[str]) -> tuple[str, ...]:
    """Say what could not be read, that dropout was off, and which conventions were accepted."""
    off = any(rank.dropout for rank in run.ranks)
    sentences = ["not compared: dropout, switched off because each rank draws masks for its own rows"] if off else []
    sentences += unread(run)
    for name in accept:
        there = {SCHEDULER: name in run.ranks[0].conventions, BATCH_NORM: run.ranks[0].steps[0].batch_norm}
        sentences.append(f"accepted: {name}: " + (CONVENTIONS[name] if there.get(name, True) else "not there"))
    return tuple(sentences)


def _reference(runner: Runner, alone: WholeRun, run: WholeRun, loaded: WholeRun) -> tuple[WholeRun, Feed]:
    """Return one process that sees the rows of all ranks, step by step, and the feed that it needed, of what is `loaded`."""
    if not any(any(ranks) for ranks in run.rows):
        raise Undecided("the model's forward receives no tensor with rows, so its data is unknown.")
    if same_data(alone, run) or same_source(alone, run):
        return alone, Feed()
    feeds = feeds_of([rank.taken for rank in loaded.ranks], alone.forwards(), run.forwards())
    tried: list[tuple[WholeRun, Feed]] = []
    ended: dict[str, NotEnded] = {}
    for feed in feeds:
        try:
            fed = runner.run(1, RunSettings(feed=feed))
        except NotEnded as why:
            ended[str(feed)] = why
            continue
        if same_data(fed, run) or ((feed.pads or feed.blind) and same_moments(fed, run, counts=not feed.blind)):
            check_numbers(runner, fed)
            return fed, feed
        tried.append((fed, feed))
    if not tried and ended:
        raise Undecided(
            f"one process was given the rows of all ranks ({', then '.join(ended)}), and {next(iter(ended.values()))} The script "
            "runs on its own rows, and may count on as many as a rank has. Mark the line where it has its batch ready: "
            "`x, y = fsdp_testing.batch(x, y)`.",
            next(iter(ended.values())).output,
        )
    if not tried:
        raise Undecided(
            "each rank takes its own rows, and neither a DataLoader nor the arguments of forward determine the loss. "
            "Mark the line where the script takes its batch: `x, y = fsdp_testing.batch(x, y)`."
        )
    raise OtherRows(tried, run)


def same_source(alone: WholeRun, run: WholeRun) -> bool:
    """Whether all ranks take the rows of one process although forward gets parts of them, such as slices of sequences.

    If their forwards together get as many rows as one process's, each got its slice of the rows, and changed them.
    """
    if all(alone.union(step).total() == run.union(step).total() for step in range(min(alone.steps, run.steps))):
        return False
    sources = [rank.taken.rows for rank in (*alone.ranks, *run.ranks)]
    known = min(map(len, sources))
    return known > 0 and all(rows[:known] == sources[0][:known] for rows in sources)


def _check_shapes(alone: WholeRun, run: WholeRun) -> None:
    before, here = initial(alone), initial(run)
    if {n: v[0].shape for n, v in before.items()} != {n: v[0].shape for n, v in here.items()}:
        odd = sorted({*before} ^ {*here}, key=str) or [n for n in before if before[n][0].shape != here[n][0].shape]
        raise Undecided(
            f"has other parameters than one process has, first {odd[0]}. A script whose model depends on the number "
            "of ranks cannot be compared; choose the model by an argument. If each rank has a part of the model, "
            "draw the whole from one seed on every rank, then take the rank's part, and call it as a module: parts of tensors "
            "outside of the modules that are called are not recognised."
        )


_GIVEN = ". It got the weights with which the ranks begin, which differ from those that it draws"
_OF_FIRST_ROWS = (
    "Cause: weights are set after the first forward began, without random numbers, as an initialisation by the first rows does, "
    "and from other numbers than one process has: reduce what a rank computes of its own rows before the weights are made of it."
)


def _with_same_start(pair: Pair) -> tuple[Pair, str]:
    """Return the world beside one process that begins with its weights, and a note if the process was given them."""
    reference, run = pair.reference, pair.run
    if reference.steps != run.steps:
        raise Failed(
            f"makes {run.steps} steps of the optimizer where one process makes {reference.steps}. Cause: the number of steps "
            "depends on the number of ranks (an early stop, or the length of a rank's data)."
        )
    difference = other_start(pair)
    if difference is None:
        return pair, ""
    other = f"starts from different weights than one process: {difference}. "
    if wrong := starts.not_loaded(reference, run, difference):
        raise Failed(other + wrong)
    other += starts.of_other_start(reference, run, difference)
    if not may_be_given_weights(run):
        raise Undecided(other)
    given = pair.with_weights()
    if given.reference.steps != run.steps:
        raise Undecided(other)
    still = other_start(given)
    drew = any(seen.evidence.drew for world in (run, given.reference) for seen in first_steps(world))
    if still is not None and still.quantity in initial(run, 1) and not drew:
        raise Failed(f"holds other weights than one process when the optimizer first steps: {still}. {_OF_FIRST_ROWS}")
    if still is not None:
        raise Undecided(other)
    return given, _GIVEN + starts.equal_shards(reference, run)
