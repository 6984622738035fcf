"""Do a world and one process with the same data compute the same?

Losses and logged numbers come last: they are judged by what they mean where everything that trains agrees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from fsdp_testing.train.function.comparison import (
    ROUNDINGS,
    Decided,
    Difference,
    Quantities,
    beyond_roundings,
    first_difference,
)
from fsdp_testing.train.function.whole import (
    GRADIENT,
    PARAMETER,
    comparable,
    loss_table,
    nothing_trained,
    only,
    rescaled,
    vanishing,
)
from fsdp_testing.train.script import causes, readings
from fsdp_testing.train.script.conventions import LOSS, AsRanks
from fsdp_testing.train.script.feeding import Feed
from fsdp_testing.train.script.parts import in_place
from fsdp_testing.train.script.report import compared_lines
from fsdp_testing.train.script.running import Failed, Runner, Undecided
from fsdp_testing.train.script.whole import COPY, WholeRun, initial, is_mean_of_weights

NEAR = 1e-3
"""Gradients that are farther apart, as parts of the largest one, need no closer look."""
View = Callable[[WholeRun], Quantities]


@dataclass(frozen=True, slots=True)
class Pair:
    """A world and one process that saw the same data.

    Attributes:
        runner: Runs either again.
        reference: The run of one process.
        run: That of the world.
        feed: What the one process was given.
        own: What the ranks were given; nothing but where they are judged with batches that are padded together.
        kept: Disturbed runs of both by seed.
    """

    runner: Runner
    reference: WholeRun
    run: WholeRun
    feed: Feed
    own: Feed = field(default_factory=Feed)
    kept: dict[int, tuple[WholeRun, WholeRun]] = field(default_factory=dict)

    @property
    def table(self) -> tuple[str, ...]:
        """Loss and norm of the gradient of both, step by step."""
        return loss_table(self.reference.quantities, self.run.quantities, self.reference.size, self.run.size)

    def difference(self, view: View, decided: Decided) -> Difference | None:
        """Return where both differ beyond what roundings may do, in what `view` shows of a run."""
        reference, run, start = view(self.reference), view(self.run), initial(self.reference)
        at_once = Decided()
        found = first_difference(reference, run, ROUNDINGS, None, at_once, start)
        if found is None:
            decided.add(at_once)
        if found is None or found.error is None:
            return found
        if not self.kept:
            repeated = first_difference(run, view(self._again(0)), 0.0)
            if repeated is not None:
                raise Undecided(f"does not repeat itself: two runs differ, first in {repeated}.")

        def disturbed(seed: int) -> list[tuple[Quantities, Quantities]]:
            return [(here, view(moved)) for here, moved in zip((reference, run), self._disturbed(seed, found))]

        return beyond_roundings(reference, run, ROUNDINGS, disturbed, decided, start)

    def compare(self, names: Sequence[str], factors: Sequence[float]) -> Difference | None:
        """Return where both differ in quantities of these names; gradients of the world times a factor for each step."""
        size = self.run.size
        return self.difference(
            lambda one: only(rescaled(one.quantities, factors if one.size == size else ()), names), Decided()
        )

    def _disturbed(self, seed: int, found: Difference) -> tuple[WholeRun, WholeRun]:
        try:
            if seed not in self.kept:
                self.kept[seed] = self.runner.run(1, feed=self.feed, seed=seed), self._again(seed)
        except (Failed, Undecided) as why:
            raise Undecided(
                f"differs from one process, {found}. To know whether roundings alone do that, it is run with other ones, and "
                f"then {why}"
            ) from why
        return self.kept[seed]

    def _again(self, seed: int) -> WholeRun:
        return in_place(self.runner.run(self.run.size, feed=self.own, seed=seed), self.run.parts)

    def as_ranks(self, accept: tuple[str, ...]) -> Pair:
        """Return the world beside one process that follows conventions as it does."""
        rows = tuple(tuple(seen.rows for seen in rank.steps) for rank in self.run.ranks)
        feed = replace(self.feed, ranks=AsRanks(accept, self.run.size, rows))
        return replace(self, reference=self.runner.run(1, feed=feed), feed=feed, kept={})

    def with_weights(self) -> Pair:
        """Return the world beside one process that begins with its weights."""
        weights = {name.removeprefix(PARAMETER): values[0] for name, values in initial(self.run).items()}
        feed = replace(self.feed, weights=weights)
        return replace(self, reference=self.runner.run(1, feed=feed), feed=feed, kept={})

    def as_ranks_agrees(self, accept: tuple[str, ...], view: View) -> bool:
        """Whether one process that follows these conventions computes the same."""
        try:
            return self.as_ranks(accept).difference(view, Decided()) is None
        except (Failed, Undecided):
            return False


def may_be_given_weights(run: WholeRun) -> bool:
    """Whether one process may begin with a world's weights: these are known number by number, and nothing was copied of them."""
    begun = [span for rank in run.ranks for step in rank.steps for spans in step.before.values() for span in spans]
    copied = any(rank.copies or any(step.strange or step.copied for step in rank.steps) for rank in run.ranks)
    return all(span.block == 1 for span in begun) and not copied


def computes_the_same(pair: Pair) -> bool:
    """Whether gradients and parameters of both are the same at each step but for roundings, and there are any."""
    reference, run = pair.reference, pair.run
    if reference.steps != run.steps or first_difference(initial(reference), initial(run), 0.0) is not None:
        return False

    def first_gradients(one: WholeRun) -> Quantities:
        return {name: values[:1] for name, values in one.quantities.items() if name.startswith(GRADIENT)}

    due, given = first_gradients(reference), first_gradients(run)
    largest = max((float(values[0].abs().max()) for values in due.values() if values[0].numel()), default=0.0)
    pairs = [(due[name][0], given[name][0]) for name in due if name in given]
    near = all(a.shape == b.shape and bool(((a - b).abs() <= NEAR * largest).all()) for a, b in pairs)
    if not largest or not near:
        return False
    kinds = (GRADIENT, PARAMETER)
    names = [name for name in run.quantities if name.startswith(kinds) and name in reference.quantities]
    return pair.difference(lambda one: only(one.quantities, names), Decided()) is None


def check_until(pair: Pair, step: int) -> None:
    """Compare all steps before this one with those of one process.

    Raises:
        Failed: An earlier step differs.
    """

    def until(run: WholeRun) -> Quantities:
        return {
            name: values[:step] for name, values in run.quantities.items() if name != readings.LOSS and len(values) > 1
        }

    names = set(comparable(until(pair.reference), until(pair.run), ROUNDINGS)[0]) if step else set()
    found = pair.difference(lambda run: only(until(run), names), Decided()) if names else None
    if found is not None:
        _fail(pair, found, causes.of_difference(pair.reference, pair.run, found))


def decide(pair: Pair) -> tuple[str, ...]:
    """Compare all that was seen, and return what was compared, what was not and why.

    Raises:
        Failed: The world differs.
        Undecided: Nothing can be said.
    """
    reference, run = pair.reference, pair.run
    names, left = comparable(reference.quantities, run.quantities, ROUNDINGS, pair.compare)
    for found in run.disagreements:
        left.append(f"{found.kind.strip()}: ranks have their own, and yet agree on parameters")
        names = [name for name in names if not name.startswith(found.kind)]
    # A variable may hold gradients by the same names, each rank's own.
    names = [name for name in names if not name.startswith(COPY) or is_mean_of_weights(reference, name)]
    _check_trained(run, names)
    trained = [name for name in names if name != readings.LOSS]
    left = [sentence for sentence in left if not sentence.endswith(f": {readings.LOSS}")]
    roundoff = max(one.roundoff for each in (reference, run) for rank in each.evidence for one in rank)
    decided, remarks = Decided(excused={*vanishing([reference.quantities, run.quantities], roundoff)}), []
    difference = pair.difference(lambda one: only(one.quantities, trained), decided)
    if difference is not None:
        first = pair.difference(lambda one: only(one.quantities, names), Decided()) or difference
        cause = causes.of_difference(reference, run, first)
        named = cause.startswith("Cause: ") or LOSS in pair.runner.launch.accept
        if not named and pair.as_ranks_agrees((LOSS,), lambda one: only(one.quantities, trained)):
            cause = causes.OWN_LOSS
        _fail(pair, first, cause)
    if readings.LOSS in run.quantities:
        remarks += _judge_losses(pair, decided)
    if not decided.enough:
        raise Undecided(
            f"roundings alone move most of {', '.join(decided.unknown[:5]) or 'what is compared'} as far as it differs. Compare "
            "fewer steps (--steps), or in float32."
        )
    remarks += [f"not decided: {sentence}, as far as roundings alone move them" for sentence in decided.open.values()]
    vanished = [name for name in decided.undecided if name in decided.excused]
    if vanished:
        remarks.append(f"not decided: {', '.join(vanished[:3])}: its gradient is zero but for roundings")
    remarks += _judge_logged(pair, scaled=any(GRADIENT.strip() in sentence for sentence in left))
    remarks += _generators(reference, run)
    return compared_lines(run, [*names, *({readings.LOSS} & {*run.quantities})], left, remarks)


def _generators(reference: WholeRun, run: WholeRun) -> list[str]:
    """Say where the states of random generators agree. They may differ: what draws rows or noise is often a rank's own."""
    found: dict[str, list[str]] = {}
    for package in run.ranks[0].steps[0].generators:
        here, there = (
            {tuple(seen.generators.get(package) for seen in rank.steps) for rank in one.ranks}
            for one in (run, reference)
        )
        own, other = ", each rank's own", ", the same on all ranks and not that of one process"
        found.setdefault(own if len(here) > 1 else other if here != there else "", []).append(package)
    return [
        f"{'not ' if how else ''}compared: the state of the random generator of {', '.join(packages)} after each step{how}"
        for how, packages in found.items()
    ]


def _fail(pair: Pair, found: Difference, cause: str) -> None:
    if any(seen.drew for rank in pair.run.ranks for seen in rank.steps[: found.step + 1]):
        raise Undecided(
            f"differs from one process, {found}, and forward draws random numbers, which cannot be the same for other shares "
            "of the data. Draw them outside forward, or switch them off for this check."
        )
    raise Failed(f"differs from one process: {found}. {cause}", pair.table)


def _check_trained(run: WholeRun, names: Sequence[str]) -> None:
    """Zeros are equal whatever they came from: a pass takes a gradient that is none."""
    strange = any(seen.strange for rank in run.ranks for seen in rank.steps)
    nothing = nothing_trained(initial(run), only(run.quantities, names), gradients_seen=not strange)
    if nothing:
        raise Undecided(f"trains nothing that can be seen: it has {nothing}. Compare more steps.")


def _judge_losses(pair: Pair, decided: Decided) -> list[str]:
    """Judge what backward was called on, where all that it trains agrees."""
    reading = readings.reading_of(pair.reference, pair.run)
    found = pair.difference(lambda run: readings.losses(run, reading), decided)
    if found is None:
        return [] if reading == readings.MEAN else [f"the loss of one process is {reading} of theirs"]
    if readings.is_some_mean(pair.reference, pair.run):
        raise Undecided(
            f"trains as one process does, but {found}, as the mean over ranks. It lies between the losses of the ranks: the "
            "script weights their gradients by numbers that are not seen. Weight the loss before backward instead, by "
            "own count x ranks / count of all ranks, or log it reduced in the same way."
        )
    _fail(
        pair,
        found,
        "Cause: gradients and parameters are those of one process and the loss is not, neither as mean nor as sum over ranks: "
        "it is scaled, and the gradient is scaled back elsewhere. Whatever is logged of it is wrong.",
    )
    return []


def _judge_logged(pair: Pair, *, scaled: bool) -> list[str]:
    """Judge numbers that the script reduced over ranks and took out of tensors, as it does for its log.

    Args:
        pair: The runs.
        scaled: Gradients of both differ by a factor, and so may their norms.
    """
    known = readings.logged(pair.reference, pair.run)
    remarks = []
    for line in known.reduced:
        found = pair.difference(partial(readings.at_line, line), Decided())
        if found is None:
            remarks.append(
                f"compared: what is taken at {line}, {len(known.reduced[line][0])} times, which the script reduced"
            )
            continue
        one, other = known.reduced[line]
        times, is_loss = readings.factor(one, other), readings.is_loss(pair.reference, 0, one)
        if is_loss or (times is not None and not scaled):
            by = "by no constant factor" if times is None else f"{times:.6g} times as large"
            _fail(
                pair,
                found,
                f"Cause: what is logged there is reduced wrongly ({by}); training agrees. Divide the sum of the ranks' numbers "
                "by the number of ranks, once, or by the sum of their weights.",
            )
        remarks.append(f"not compared: the number taken at {line} is the same on all ranks and not that of one process")
    remarks += [f"not compared: the number taken at {line}, each rank's own" for line in known.own]
    return remarks + [
        f"not compared: the number taken at {line}, taken another number of times" for line in known.uneven
    ]
