"""Decides for a script, a function or a model whether a world and the reference world compute the same.

Losses and logged numbers come last: their meaning is judged only if everything that trains agrees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from fsdp_testing.cases.records.specs import UNIT_ROUNDOFF
from fsdp_testing.errors import WorldFailed
from fsdp_testing.train import between_steps, causes, multiples, readings
from fsdp_testing.train.comparable import Comparable, comparable, only, vanishing
from fsdp_testing.train.comparison import Decided, Difference
from fsdp_testing.train.control import control
from fsdp_testing.train.conventions import MEASURED
from fsdp_testing.train.idle import idle_lines, nothing_trained
from fsdp_testing.train.pair import Pair, fail
from fsdp_testing.train.quantities import LOSS, Kind, Quantities, Quantity
from fsdp_testing.train.report import KINDS, compared_lines
from fsdp_testing.train.running import Failed, Undecided
from fsdp_testing.train.terms_of_worlds import AFTER_BACKWARD
from fsdp_testing.train.whole import WholeRun, copies_left_out, initial, means_of_weights, outdated_in_use, with_ends


@dataclass(frozen=True, slots=True)
class Compared:
    """What was compared.

    Attributes:
        lines: What was compared at each step, and what was not and why.
        unknown: What could not be judged although it should be compared.
    """

    lines: tuple[str, ...]
    unknown: tuple[str, ...] = ()


def decide(pair: Pair) -> Compared:
    """Compare everything observed, and return what was compared, what was not and why.

    Raises:
        Failed: The world differs, in low precision or in full.
        Undecided: There is no verdict.
    """
    try:
        compared = _decide(pair)
    except Undecided:
        _in_single_precision(pair, _HIDDEN)  # where the world may turn out to differ
        raise
    except Failed as why:
        # Roundings may hide the first steps that differ, and so the cause.
        lines = _in_single_precision(pair, _BOTH) if why.first is not None else []
        if _AGREES not in lines:
            raise
        raise Failed(f"{why} {_ONLY_LOW}", why.table, why.output, why.subject, why.first) from why
    return replace(compared, lines=(*compared.lines, *_in_single_precision(pair, _HIDDEN)))


_AGREES = (
    "compared in float32, too, where roundings hide little: without autocast, mixed precision and casts to 16 bits"
)
_HIDDEN = "This shows in float32; roundings of low precision hide it."
_BOTH = "These numbers are of a run in float32; the training in its own precision differs, too."
_ONLY_LOW = "In float32 both compute the same: look at what is cast, or rounded, differently."


def _in_single_precision(pair: Pair, remark: str) -> list[str]:
    """Compare what a training in low precision computes in float32, where roundings hide little; return the result.

    Raises:
        Failed: The world differs; the remark ends the sentence.
    """
    if not pair.runner.low_precision or not _is_low(pair):
        return []
    try:
        exact = pair.in_single_precision()
    except (Failed, Undecided, WorldFailed) as why:
        return [f"not compared in float32, where roundings hide less: {why}"]
    try:
        _decide(exact)
    except Failed as why:
        raise Failed(f"{why} {remark}", why.table, why.output, why.subject, why.first) from why
    except Undecided as why:
        return [f"not decided in float32: {why}"]
    return [_AGREES]


def _is_low(pair: Pair) -> bool:
    """Whether a training computes anything in less than single precision, as far as this was seen."""
    worlds = (pair.reference, pair.run, *pair.disturbed)
    units = [max(seen.evidence.roundoff, seen.evidence.computed) for world in worlds for seen in world.seen]
    asked = any(rank.low_precision for world in worlds for rank in world.ranks)
    return asked or max(units, default=0.0) > UNIT_ROUNDOFF["float32"]


def _decide(pair: Pair) -> Compared:
    """Compare the observations of two worlds; errors as in `decide`."""
    reference, run, start = pair.reference, pair.run, pair.runner.start
    chosen = comparable(
        _seen(reference), _seen(run), start.roundings, pair.compare, losses_are_equal=start.losses_are_equal
    )
    left = chosen.left_out(losses=start.losses_are_equal)
    apart = [odd.kind for odd in run.disagreements]
    left += [f"{KINDS.get(kind, kind.value.strip())}: each rank has its own, though parameters agree" for kind in apart]
    left += copies_left_out(reference, run)
    # A variable may hold gradients by the same names, each rank's own.
    means = means_of_weights(reference)
    names = [key for key in chosen.names if key.kind is not Kind.COPY or key in means]
    returned = [key for world in (reference, run) for key in world.names(Kind.RETURNED)]
    names = [*dict.fromkeys(returned), *(key for key in names if key.kind not in apart)]
    trained = [key for key in names if key != LOSS or start.losses_are_equal]
    roundoff = max((seen.evidence.roundoff for world in (reference, run) for seen in world.seen), default=0.0)
    decided = Decided(excused=vanishing([reference.quantities, run.quantities], roundoff))
    other_steps = _other_steps(reference, run)
    if other_steps is not None:
        trained = [key for key in trained if key.kind is Kind.RETURNED]
    difference = pair.difference(lambda world: only(world.quantities, trained), decided) or other_steps
    if difference is not None:
        _fail_by(pair, difference, names, trained)
    if pair.apart_in_dtype:
        raise Failed(
            f"does not compute what {pair.other} does, though roundings hide it. {pair.apart_in_dtype}", pair.table
        )
    wrong = causes.wrong_in_itself(run, start.accept) or causes.wrong_in_itself(reference, start.accept)
    if wrong:
        raise Failed(f"is wrong with any number of ranks: {wrong}", pair.table)
    check_trained(run, names)
    remarks = _judge_losses(pair, decided) if LOSS in run.quantities and start.takes_rows else []
    decided.excuse_zeros(LOSS)
    unknown = _undecided(decided, exact=not _is_low(pair))
    vanished = [str(key) for key in decided.undecided if key in decided.excused]
    if vanished:
        what = "it" if vanished == [str(LOSS)] else "its gradient"
        remarks.append(f"not decided: {', '.join(vanished[:3])}: {what} is zero but for roundings")
    # A line that logs the loss of the last micro-batch takes that of other rows where there are more.
    other_passes = pair.varied is not None and pair.passes_differ
    remarks += [] if other_passes else _judge_logged(pair, chosen)
    remarks += [*_generators(pair), *([between_steps.REMARK] if run.averaged else [])]
    remarks += [control(run, measures=MEASURED in start.accept).line, *idle_lines(run)]
    named = [*names, *({LOSS} & {*run.quantities})]
    return Compared(compared_lines((reference, run), named, left, remarks), (*unknown, *_not_compared(pair, decided)))


def _seen(run: WholeRun) -> Quantities:
    return {key: values for key, values in run.quantities.items() if key.kind is not Kind.RETURNED}


def _other_steps(reference: WholeRun, run: WholeRun) -> Difference | None:
    """Return a sentence if worlds make different numbers of optimizer steps, or one of them steps fewer parameters."""
    if reference.steps != run.steps:
        of_ranks = ": the number of steps depends on the number of ranks" if reference.size != run.size else ""
        sentence = f"has {run.steps} steps, expected {reference.steps}{of_ranks}"
        return Difference(Quantity(Kind.RETURNED, "the optimizer"), 0, 1, sentence)
    here, there = run.names(Kind.PARAMETER), reference.names(Kind.PARAMETER)
    if run.own or not here or {*here} - {*there}:
        return None  # parts and other names have no counterparts; the verdict says so
    lacking = sorted({*there} - {*here}, key=str)
    return Difference(lacking[0], 0, 1, "is trained by the reference only") if lacking else None


def _fail_by(pair: Pair, difference: Difference, names: Sequence[Quantity], trained: Sequence[Quantity]) -> None:
    """Raise the difference with its cause; an earlier difference of the loss is named instead."""
    returns_loss = any("loss" in key.name.lower() for key in names if key.kind is Kind.RETURNED)
    if LOSS in names and not returns_loss and difference.error is not None:
        difference = pair.difference(lambda world: only(world.quantities, names), Decided()) or difference
    cause = pair.cause(difference)
    is_set = difference.quantity.kind in (Kind.RATE, Kind.SETTING) or pair.varied is not None
    apart = not is_set and pair.agrees_apart(lambda world: only(world.quantities, trained))
    if not cause.startswith("Cause: ") and not is_set:
        outdated = outdated_in_use(pair.run)
        apart = apart and not outdated
        cause = f"Cause: {outdated}" if outdated else cause
    if not cause.startswith(("Cause: ", AFTER_BACKWARD)) and not is_set:
        suspect = "" if pair.varied else readings.suspects(pair.reference, pair.run, difference.step)
        cause = multiples.OWN_IN_FORWARD if apart else pair.cause_of_ranks(difference) or _with(suspect, cause)
    fail(pair, difference, cause)


def _with(suspect: str, cause: str) -> str:
    """Return a hint behind what is told where no cause was seen."""
    return f"{cause} {suspect}" if suspect else cause


def _undecided(decided: Decided, *, exact: bool) -> list[str]:
    """Return a sentence on what roundings alone decide, where the rest is known.

    Args:
        decided: How much was decided.
        exact: Whether all was computed in single precision at least, where most of a quantity is undecided at no step by chance.

    Raises:
        Undecided: Some quantity, or most numbers, cannot be judged.
    """
    lines = list(decided.open.values())
    more = f", and {len(lines) - 5} more" if len(lines) > 5 else ""
    moved = f"rounding alone moves these numbers as far as the worlds differ: {'; '.join(lines[:5])}{more}"
    odd = [f"{key} at step {step}" for key, step in decided.open if exact and (key, step) in decided.mostly]
    if odd or not decided.enough:
        keys = ", ".join([*map(str, decided.unknown), *odd][:5]) or "what is compared"
        raise Undecided(
            f"{moved}. "
            * bool(lines)
            + f"Roundings decide most of {keys}, so the loop cannot be judged. Train fewer steps, in float32 or float64 "
            "without autocast, with an optimizer that does not divide gradients by their size, or without ties (the largest of "
            "equal numbers)."
        )
    return [f"{moved}. These have no verdict; the rest agrees."] if lines else []


def _not_compared(pair: Pair, decided: Decided) -> list[str]:
    """Return sentences on parameters that could not be compared.

    Raises:
        Undecided: No comparable parameter is left.
    """
    reference, run, sentences = pair.reference, pair.run, []
    unreadable = next((seen.unreadable for world in (reference, run) for seen in world.seen if seen.unreadable), "")
    odd = sorted({*reference.names(Kind.PARAMETER)} ^ {*run.names(Kind.PARAMETER)}, key=str)
    if run.own:
        sentences.append(
            f"Ranks have different parts under the same name, {len(run.own)} parameters, first {run.own[0]}: these "
            "are not compared. Return what the ranks compute together."
        )
    if unreadable:
        sentences.append(f"Parameters could not be read ({unreadable}), and only what the loop returns is compared.")
    elif odd and not run.own:
        sentences.append(
            f"{len(odd)} parameters have this name in one of both worlds only, and are not compared: first {odd[0]}."
        )
    if not any(key.kind in (Kind.RETURNED, Kind.PARAMETER, Kind.END) for key in decided.numbers):
        sentences.append("Nothing that is returned can be compared, and no parameter either.")
        raise Undecided(" ".join(sentences))
    return sentences


def _generators(pair: Pair) -> list[str]:
    """Say where the states of random generators agree. They may differ: what draws rows or noise is often a rank's own."""
    reference, run = pair.reference, pair.run
    packages: dict[str, list[str]] = {}
    for package in next((seen.generators for seen in run.seen), {}):
        here, there = (
            {tuple(seen.generators.get(package) for seen in rank.steps) for rank in world.ranks}
            for world in (run, reference)
        )
        own, other = ", each rank's own", ", the same on all ranks but not that of " + pair.other
        packages.setdefault(own if len(here) > 1 else other if here != there else "", []).append(package)
    return [
        f"{'not ' if how else ''}compared: the state of the random generator of {', '.join(named)} after each step{how}"
        for how, named in packages.items()
    ]


def check_something(run: WholeRun) -> None:
    """Refuse a run whose comparison would prove nothing.

    Raises:
        Undecided: There is nothing to compare, or nothing was trained.
    """
    returned = any(value.numel() for key in run.names(Kind.RETURNED) for value in run.quantities[key])
    if not returned and not run.names(Kind.PARAMETER, Kind.END):
        raise Undecided(
            "gives no verdict, since nothing is compared: the loop returns nothing, and no optimizer step with comparable "
            "parameters was seen. Return what it computes, as {'loss': losses, 'weight': model.weight.detach()}."
        )
    passes = run.ranks[0].idle_passes
    if passes and all(value.numel() == 1 for key in run.names(Kind.RETURNED) for value in run.quantities[key]):
        raise Undecided(
            f"shows no training: {passes} backward passes ran, no optimizer stepped, no weight moved, and only "
            f"single numbers are returned, so the gradients cannot be judged. Step an optimizer, or return the "
            f"gradients."
        )
    check_trained(run, list(run.quantities))


def check_trained(run: WholeRun, names: Sequence[Quantity]) -> None:
    """Zeros are equal whatever they came from: a pass needs a nonzero gradient."""
    strange = any(seen.strange for seen in run.seen)
    lacking = nothing_trained(with_ends(initial(run)), only(run.quantities, names), gradients_seen=not strange)
    if lacking:
        raise Undecided(
            f"shows no training: it has {lacking} in any step, and zeros are equal whatever they came from. "
            "Look for gradients that are cleared before the step, a loss that does not depend on the model, or a learning rate "
            "of zero, or compare more steps."
        )


def _judge_losses(pair: Pair, decided: Decided) -> list[str]:
    """Judge the losses, given that everything they train agrees."""
    reading = readings.reading_of(pair.reference, pair.run)
    difference = pair.difference(lambda run: readings.losses(run, reading), decided)
    if difference is None:
        return [] if reading == readings.MEAN else [f"the loss of one process is {reading} of theirs"]
    if pair.varied is None and readings.is_some_mean(pair.reference, pair.run):
        raise Undecided(
            f"trains as one process does, but {difference}, as the mean over ranks. It lies between the losses of the ranks: the "
            "script weights their gradients by numbers that the check cannot see. Weight the loss before backward "
            "instead, by own count x ranks / count of all ranks, or log it reduced in the same way."
        )
    fail(
        pair,
        difference,
        f"Cause: gradients and parameters are those of {pair.other} and the loss is not, neither as mean nor as sum over ranks: "
        "it is scaled, and the gradient is scaled back elsewhere. Every logged value of it is wrong.",
    )
    return []


def _judge_logged(pair: Pair, chosen: Comparable) -> list[str]:
    """Judge numbers that a script reduced over ranks and took out of tensors, as it does for its log.

    Args:
        pair: The runs.
        chosen: Whether gradients of both differ by a factor, and so may their norms.
    """
    known = readings.logged(pair.reference, pair.run)
    remarks = []
    for line, (one, other) in known.reduced.items():
        try:
            difference = pair.difference(partial(readings.at_line, line), Decided())
        except Undecided as why:  # a time, that no run repeats, says nothing of the training
            remarks.append(f"not compared: the number read at {line}: {str(why).partition('. ')[0]}")
            continue
        if difference is None:
            remarks.append(f"compared: the number read at {line}, {len(one)} times, which the script reduced")
            continue
        times, is_loss = readings.factor(one, other), readings.is_loss(pair.reference, 0, one)
        wrong = times is not None and (
            not readings.is_constant(other) or readings.is_summed_or_divided(one, other, pair.run.size)
        )
        if pair.feed.source and (pair.passes_differ or pair.feed.scale != 1.0):
            remarks.append(f"not compared: the number read at {line}: one process may add up more micro-batches")
            continue
        if is_loss or (wrong and chosen.factor is None):
            by = "by no constant factor" if times is None else f"{times:.6g} times as large"
            fail(
                pair,
                difference,
                f"Cause: the number logged there is reduced wrongly ({by}); training agrees. Divide the sum of the "
                "ranks' numbers by the number of ranks, once, or by the sum of their weights.",
            )
        got, expected = (float(numbers[difference.step]) for numbers in (other, one))
        remarks.append(
            f"not compared: the number read at {line} is the same on all ranks but differs from one process: got {got:.6g}, "
            f"expected {expected:.6g}"
        )
    remarks += [f"not compared: the number read at {line}, each rank's own" for line in known.own]
    remarks += [
        f"not compared: the number read at {line}, which Python code multiplies or divides" for line in known.carried
    ]
    return remarks + [
        f"not compared: the number read at {line}, read a different number of times" for line in known.uneven
    ]
