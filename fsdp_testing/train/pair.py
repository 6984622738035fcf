"""Pairs a world with the reference world that saw the same data, and finds where both differ beyond roundings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from fsdp_testing.errors import WorldFailed
from fsdp_testing.train import causes, evidence, multiples
from fsdp_testing.train.comparable import comparable, loss_table, only, rescaled, vanishing
from fsdp_testing.train.comparison import CLEAR_ROUNDINGS, Decided, Difference, difference_of, first_difference
from fsdp_testing.train.conventions import BATCH_NORM, LOSS, AsRanks
from fsdp_testing.train.feed import Feed, feeds_of
from fsdp_testing.train.on_rank import RunSettings
from fsdp_testing.train.parts import in_place
from fsdp_testing.train.quantities import Kind, Quantities, Quantity
from fsdp_testing.train.running import Failed, Runner, Undecided
from fsdp_testing.train.whole import WholeRun, initial, whole, with_ends

NEAR = 1e-3
"""Gradients that are farther apart, as parts of the largest one, need no closer look."""
View = Callable[[WholeRun], Quantities]
_UNION = "one process given the rows of all ranks"
_APART = "one process that runs the rows of each rank separately, and averages"
_EACH = "one process that gets the rows of each rank in turn, at step 0"


@dataclass(frozen=True, slots=True)
class Varied:
    """The variation of a world that has as many ranks as its reference.

    Attributes:
        runner: Runs the world again.
        names: Names of the reference and of the world, for messages.
        cause: Returns why both differ.
    """

    runner: Runner
    names: tuple[str, str]
    cause: Callable[[WholeRun, WholeRun, Difference], str]


@dataclass(frozen=True, slots=True)
class Pair:
    """A world and the reference world, which saw the same data.

    Attributes:
        runner: Runs either again.
        reference: The run of the reference world.
        run: That of the world.
        feed: What the reference was given.
        own: Data given to the ranks; only if they are judged with batches that are padded together.
        kept: Disturbed runs of both by seed.
        varied: The variation, if it is not the number of ranks.
        tried: For each way to take the rows other than as one batch, whether one process then computes the same.
    """

    runner: Runner
    reference: WholeRun
    run: WholeRun
    feed: Feed = field(default_factory=Feed)
    own: Feed = field(default_factory=Feed)
    kept: dict[int, tuple[WholeRun, WholeRun]] = field(default_factory=dict)
    varied: Varied | None = None
    tried: dict[str, bool] = field(default_factory=dict)

    @property
    def other(self) -> str:
        return self.varied.names[0] if self.varied else self.runner.start.world(self.reference.size)

    def cause(self, difference: Difference) -> str:
        why = self.varied.cause if self.varied else causes.of_difference
        return why(self.reference, self.run, difference)

    @property
    def passes_differ(self) -> bool:
        """Whether backward is called another number of times before a step."""
        due, ranks = self.reference.ranks, self.run.ranks
        pairs = zip(due if len(due) == len(ranks) else (due[0],) * len(ranks), ranks)
        return any(
            len(one.losses) != len(other.losses) for pair in pairs for one, other in zip(*(rank.steps for rank in pair))
        )

    @property
    def table(self) -> tuple[str, ...]:
        """Loss and norm of the gradient of both, step by step, and which reference holds where two were tried."""
        tried = [
            f"{_UNION}: differs; {how}: {'the same' if same else 'differs, too'}" for how, same in self.tried.items()
        ]
        return (*loss_table(self.reference, self.run, self.varied.names if self.varied else None), *tried)

    @property
    def disturbed(self) -> tuple[WholeRun, ...]:
        """Disturbed runs of the world, in which each operation was seen."""
        return tuple(there for seed, (_, there) in self.kept.items() if seed)

    @property
    def apart_in_dtype(self) -> str:
        """The cause where ranks that do the same work compute it in different dtypes; empty where that was not seen."""
        alike = [
            run for run in self.disturbed if not (run.shares_work or run.own or any(seen.sent for seen in run.seen))
        ]
        return next((cause for run in alike if (cause := evidence.of_dtypes(run.evidence))), "")

    def difference(self, view: View, decided: Decided, view_run: View | None = None) -> Difference | None:
        """Return where both differ beyond roundings.

        Args:
            view: Selects what is compared of the reference.
            decided: Counts how much was compared.
            view_run: What is compared of the world, if something else.
        """
        view_run = view_run or view
        reference, run, start = view(self.reference), view_run(self.run), with_ends(initial(self.reference))
        roundings = self.runner.start.roundings
        difference = first_difference(reference, run, roundings, start=start)
        if difference is not None and difference.error is not None and not self.kept:
            if self.varied is not None:
                check_repeats(self.runner, self.reference, self._reference_again(0), view)
            check_repeats(self.runner, self.run, self._again(0), view_run)

        def disturbed(seed: int) -> list[tuple[Quantities, Quantities]]:
            here, there = self._disturbed(seed, difference)
            return [(reference, view(here)), (run, view_run(there))]

        return difference_of(reference, run, disturbed, decided, start, roundings)

    def compare(self, names: Sequence[Quantity], factors: Sequence[float] = ()) -> Difference | None:
        """Return where both differ in these quantities; the world's gradients are multiplied by a factor for each step."""
        return self.difference(
            lambda run: only(run.quantities, names),
            Decided(),
            lambda run: only(rescaled(run.quantities, factors), names),
        )

    def _disturbed(self, seed: int, difference: Difference | None) -> tuple[WholeRun, WholeRun]:
        try:
            if seed not in self.kept:
                self.kept[seed] = self._reference_again(seed), self._again(seed)
        except (Failed, Undecided, WorldFailed) as why:
            raise Undecided(
                f"differs from {self.other}: {difference}. To learn whether rounding alone does that, the check runs "
                f"it with different roundings, and then it does not finish: {why}"
            ) from why
        return self.kept[seed]

    def _reference_again(self, seed: int) -> WholeRun:
        size, settings = self.reference.size, RunSettings(feed=self.feed, seed=seed)
        plain = self.feed.is_plain and seed
        again = self.runner.disturbed(size, seed) if plain else self.runner.run(size, settings)
        return in_place(again, self.reference.parts)

    def _again(self, seed: int) -> WholeRun:
        runner = self.varied.runner if self.varied else self.runner
        again = runner.run(self.run.size, RunSettings(feed=self.own, seed=seed))
        if self.run.own or self.run.averaged:
            again = whole(again.size, again.ranks, self.run.own, disturbs_averages=self.run.averaged)
        return in_place(again, self.run.parts)

    def as_ranks(self, accept: tuple[str, ...]) -> Pair:
        """Return the world beside one process that follows conventions as it does."""
        rows = tuple(tuple(seen.rows for seen in rank.steps) for rank in self.run.ranks)
        return self.beside(replace(self.feed, ranks=AsRanks(accept, self.run.size, rows)))

    def in_single_precision(self) -> Pair:
        """Return both worlds in float32 where they compute in low precision; errors as of `Runner.run`."""
        runner = self.runner.in_single_precision()
        varied = self.varied and replace(self.varied, runner=self.varied.runner.in_single_precision())
        pair = replace(self, runner=runner, varied=varied, kept={}, tried={})
        return replace(pair, reference=pair._reference_again(0), run=pair._again(0))

    def collated(self, *, together: bool) -> Pair:
        """Return the world beside one process that collates the rows of all ranks, or gets the ranks' batches."""
        return self.beside(replace(self.feed, collates=together))

    def with_weights(self) -> Pair:
        """Return the world beside one process that begins with its weights."""
        weights = {key.name: values[0] for key, values in initial(self.run).items()}
        return self.beside(replace(self.feed, weights=weights))

    def beside(self, feed: Feed) -> Pair:
        """Return the world beside one process that is given this."""
        return replace(self, reference=self.runner.run(1, RunSettings(feed=feed)), feed=feed, kept={}, tried={})

    def agrees_apart(self, view: View) -> bool:
        """Whether one process that runs each rank's rows separately, and averages, agrees; noted in `tried`."""
        if self._takes_own_rows and not self.tried and LOSS not in self.runner.start.accept:
            try:
                other = self.as_ranks((LOSS, BATCH_NORM))
                due, given = view(other.reference), view(other.run)
                names = {*due, *given} - vanishing([other.reference.quantities, other.run.quantities], 0.0)
                far = first_difference(only(due, names), only(given, names), CLEAR_ROUNDINGS)
                self.tried[_APART] = far is None and other.difference(view, Decided()) is None
            except (Failed, Undecided, WorldFailed):
                return False
        return self.tried.get(_APART, False)

    def cause_of_ranks(self, difference: Difference) -> str:
        """Return the cause that shows when one process gets the rows of each rank in turn; empty if none does.

        Only differences at the first step count, which it makes with the weights of all ranks.
        """
        known = self.runner.start.takes_rows and self._takes_own_rows and self.varied is None and difference.step == 0
        each = each_rank(self) if known else []
        cause = multiples.of_ranks(self.reference, self.run, each) if each else ""
        if multiples.is_own_statistic(cause):
            self.tried[_EACH] = True
        return cause

    @property
    def _takes_own_rows(self) -> bool:
        return self.reference.size == 1 < self.run.size and not self.run.shares_work and all(map(any, self.run.rows))


def each_rank(pair: Pair) -> list[WholeRun]:
    """Return one process with the rows of each rank in turn, until its first step; nothing where it cannot be given them."""
    runs = []
    for rank in pair.run.ranks:
        forwards = len(rank.steps[0].rows)
        feeds = feeds_of([rank.taken], forwards, forwards)
        feed = next((feed for feed in feeds if pair.feed.source in (None, feed.source)), None)
        if feed is None:
            return []
        try:
            settings = RunSettings(feed=replace(feed, weights=pair.feed.weights), steps=1)
            runs.append(pair.runner.run(1, settings))
        except (Failed, Undecided, WorldFailed):
            return []
        if runs[-1].ranks[0].steps[0].rows != rank.steps[0].rows:
            return []
    return runs


def returned(run: WholeRun) -> Quantities:
    """Return a function's results."""
    return only(run.quantities, run.names(Kind.RETURNED))


def check_repeats(runner: Runner, run: WholeRun, again: WholeRun, view: View = lambda run: run.quantities) -> None:
    """Compare two runs of one world to the bit: what a function returns, and of others what `view` shows.

    Raises:
        Failed, Undecided: They differ; which of both is the start's.
    """
    if runner.start.returns:
        view = returned
    difference = first_difference(view(run), view(again), 0.0)
    if difference is None:
        return
    if runner.start.returns:
        raise Failed(
            f"differ: {difference}. The loop is not a function of its seeds; seed every generator it uses, then compare world "
            "sizes.",
            subject="two runs on",
        )
    where = "" if runner.start.takes_rows else f" in {runner.start.world(run.size)}"
    raise Undecided(
        f"does not repeat itself: two runs{where} differ, first in {difference}. It must be a "
        "function of its weights and rows: seed every generator that it uses (torch, numpy, random, the workers of DataLoaders)."
    )


def may_be_given_weights(run: WholeRun) -> bool:
    """Whether one process may begin with a world's weights: these are known number by number, and no copy of them exists."""
    begun = [span for seen in run.seen for spans in seen.before.values() for span in spans]
    copied = any(any(rank.copies.values()) for rank in run.ranks) or any(
        seen.strange or seen.of(Kind.COPIED) for seen in run.seen
    )
    return all(span.block == 1 for span in begun) and not copied


def other_start(pair: Pair) -> Difference | None:
    """Return the first difference between the initial weights of a world and the reference that roundings do not explain.

    Roundings move weights that a model makes of its first rows, those of a model that is loaded from its own checkpoint during
    the training, and those that are edited between backward passes and restored before the step.

    Raises:
        Failed: A step before a model that is made during the training differs.
    """
    reference, run = pair.reference, pair.run
    if first_difference(initial(reference), initial(run), 0.0) is None:
        return None
    first = initial(reference, 1)
    difference = first_difference(first, initial(run, 1), CLEAR_ROUNDINGS) or pair.difference(initial, Decided())
    if difference is not None and difference.quantity not in first:
        check_until(pair, next(n for n, seen in enumerate(run.ranks[0].steps) if difference.quantity in seen.before))
    return difference


def computes_the_same(pair: Pair) -> bool:
    """Whether gradients and parameters of both are the same at each step but for roundings, and there are any."""
    reference, run = pair.reference, pair.run
    if reference.steps != run.steps or first_difference(initial(reference, 1), initial(run, 1), 0.0) is not None:
        return False
    due, given = ({key: world.quantities[key][0] for key in world.names(Kind.GRADIENT)} for world in (reference, run))
    largest = max((float(value.abs().max()) for value in due.values() if value.numel()), default=0.0)
    pairs = [(due[key], given[key]) for key in due if key in given]
    near = all(a.shape == b.shape and bool(((a - b).abs() <= NEAR * largest).all()) for a, b in pairs)
    if not largest or not near:
        return False
    return (
        pair.compare([key for key in run.names(Kind.GRADIENT, Kind.PARAMETER) if key in reference.quantities]) is None
    )


def check_until(pair: Pair, step: int) -> None:
    """Compare all steps before this one with those of the reference.

    Raises:
        Failed: An earlier step differs.
    """

    def until(run: WholeRun) -> Quantities:
        kinds = (Kind.LOSS, Kind.RETURNED)
        return {key: v[:step] for key, v in run.quantities.items() if key.kind not in kinds and len(v) > 1}

    names = comparable(until(pair.reference), until(pair.run), pair.runner.start.roundings).names if step else []
    difference = pair.difference(lambda run: only(until(run), names), Decided()) if names else None
    if difference is not None:
        fail(pair, difference, pair.cause(difference))


def fail(pair: Pair, difference: Difference, cause: str) -> None:
    """Raise the difference.

    Raises:
        Undecided: A forward draws random numbers of a script or a model, which has to have the same for other rows.
        Failed: Otherwise.
    """
    runs = (pair.run, *pair.disturbed)
    drawn = any(seen.drew for run in runs for rank in run.ranks for seen in rank.steps[: difference.step + 1])
    if drawn and not pair.runner.start.returns:
        raise Undecided(
            f"differs from {pair.other}, {difference}, and forward draws random numbers, which cannot be the same for other "
            "shares of the data. Draw them outside forward, or switch them off for this check."
        )
    raise Failed(
        f"differs from {pair.other}: {difference}. {pair.apart_in_dtype or cause}", pair.table, first=difference
    )
