"""Runs a training on a world, however it is started, and judges a run that does not finish."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

from fsdp_testing.errors import WorldFailed
from fsdp_testing.judging.worlds import usable_processors
from fsdp_testing.ranks.faults.fault import Fault
from fsdp_testing.ranks.pool import Fate, Pool, WorldOutcome
from fsdp_testing.train.comparison import ROUNDINGS, Difference
from fsdp_testing.train.on_rank import Job, RankReport, RunSettings, mark_of, run_here
from fsdp_testing.train.whole import WholeRun, whole

_SLOWER = 3.0
"""How many times as long as one process ranks may take, besides the time lost by sharing processors."""


class Undecided(Exception):
    """Ends the judgement of a world without a verdict, for this reason; `output` is the end of the script's output."""

    def __init__(self, sentence: str, output: tuple[str, ...] = ()) -> None:
        super().__init__(sentence)
        self.output = output


class NotEnded(Undecided):
    """A script did not end well in one process."""


class Failed(Exception):
    """Ends the judgement of a world: it is wrong.

    Attributes:
        subject: The ranks that the sentence is about; by default the whole world.
        table: Loss and norm of both worlds, step by step; for races, both places of each.
        output: End of the script's output.
        first: The first difference, if it is a number.
    """

    def __init__(
        self,
        sentence: str,
        table: tuple[str, ...] = (),
        output: tuple[str, ...] = (),
        subject: str = "",
        first: Difference | None = None,
    ) -> None:
        super().__init__(sentence)
        self.table, self.output, self.subject, self.first = table, output, subject, first


class RunListener(Protocol):
    """Listens to each run of the training."""

    def started(self, what: str) -> None:
        """Note that a run begins; `what` names it in a few words."""

    def ended(self, what: str, seconds: float, outcome: WorldOutcome) -> None:
        """Note that a run ended, with its ranks' results and output."""


class Start:
    """A way to start a training: what differs between a script, a function and a model. Each is a frozen dataclass.

    Attributes:
        timeout: Seconds until a rank counts as hung.
        backend: Backend of the worlds.
        isolation: "fresh" runs each time in new processes; "warm" in kept ones, where modules stay imported.
        steps: Optimizer steps after which the training is ended; 0 means never.
        accept: Names of conventions that one process is to follow as the ranks do (`conventions`).
        resume_at: Step before which it is stopped to be resumed; 0 means never.
        resume_arguments: Further arguments of the resumed run.
        streams: Whether its streams are judged too.
        faults: Faults injected into its ranks.
        roundings: Roundings that pass at once (`comparison.ROUNDINGS`).
        variation: The change that must change nothing, in words; empty without a change.
        takes_rows: Whether one process may be given the rows of the ranks, and the losses of these be read in several ways: else
            all worlds take the same rows by themselves.
        returns: Whether it returns what to compare, its own loss included.
    """

    timeout: float
    backend: str = "gloo"
    isolation: str = "warm"
    steps: int = 0
    accept: tuple[str, ...] = ()
    resume_at: int = 0
    resume_arguments: tuple[str, ...] = ()
    streams: bool = False
    faults: tuple[Fault, ...] = ()
    roundings: float = ROUNDINGS
    variation: str = ""
    takes_rows: ClassVar[bool] = False
    returns: ClassVar[bool] = False

    @property
    def resumes(self) -> bool:
        """Whether a run is started again from what it saved."""
        return bool(self.resume_at or self.resume_arguments)

    @property
    def lasting(self) -> frozenset[str]:
        """Kinds of process state that a run may change for good."""
        return frozenset()

    @property
    def modules(self) -> tuple[str, ...]:
        """Modules that take long to import."""
        return ()

    @property
    def name(self) -> str:
        """The name of the trained script, function or model, for messages."""
        raise NotImplementedError

    def world(self, size: int) -> str:
        """Return the name of a world."""
        return "one process" if size == 1 else f"{size} ranks"

    @property
    def losses_are_equal(self) -> bool:
        """Whether the mean of the ranks' losses must be the loss of one process."""
        return not self.takes_rows and not self.returns

    def sentence(self, size: int, why: Failed | Undecided) -> str:
        """Return why a world is judged as it is."""
        return f"{getattr(why, 'subject', '')} {why}".lstrip()

    def job(self, size: int) -> Job:
        """Return the job of a rank in a world of this size."""
        raise NotImplementedError

    @contextmanager
    def prepared(self, pool: Pool, run: RunSettings) -> Iterator[RunSettings]:
        """Prepare a run, and clean up after it."""
        yield run

    def execute(self, pool: Pool, size: int, run: RunSettings) -> WorldOutcome:
        """Run a prepared run on a world of the pool, and return what its ranks did."""
        world = pool.world(size, self.backend, self.isolation)
        try:
            world.patient = bool(run.faults)
            job = self.job(size), run
            return world.execute(run_here, job, timeout=self.timeout, name=self.name, lasting=self.lasting)
        finally:
            world.release()

    def ending(self, outcome: WorldOutcome) -> Exception:
        """Return the exception for ranks that did not finish."""
        return WorldFailed(outcome.describe(), outcome)

    def check(self, ranks: Sequence[RankReport]) -> None:
        """Refuse reports that cannot be compared.

        Raises:
            Undecided: For this reason.
        """


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs a training on worlds of a pool; `listener` is told of each run.

    Attributes:
        kept: Disturbed runs by size and seed, of worlds that take their own data.
        unsteady: Sentences on worlds that hung once and not again.
        seconds: What each run of one process took that came to its end.
        low_precision: Whether it computes in low precision where the training asks for it.
        idle: Ranks of the last run that ran no backward pass and made no step.
    """

    start: Start
    pool: Pool
    listener: RunListener | None = None
    kept: dict[tuple[int, int], WholeRun] = field(default_factory=dict)
    unsteady: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    low_precision: bool = True
    idle: list[int] = field(default_factory=list)

    def beside(self, start: Start) -> Runner:
        """Return a runner of the same training, started differently."""
        return replace(self, start=start, kept={}, unsteady=[], idle=[])

    def in_single_precision(self) -> Runner:
        """Return a runner of the same training in float32 where it computes in low precision."""
        return replace(self, low_precision=False, kept={}, unsteady=[], idle=[])

    def timeout(self, size: int) -> float:
        """Return the seconds until a rank counts as hung: many ranks on few processors are no hang."""
        share = max(1.0, size / usable_processors())
        return (
            max(self.start.timeout, _SLOWER * share * max(self.seconds, default=0.0))
            if size > 1
            else self.start.timeout
        )

    def disturbed(self, size: int, seed: int) -> WholeRun:
        """Return a run with different roundings, which depend on the seed."""
        if (size, seed) not in self.kept:
            self.kept[size, seed] = self.run(size, RunSettings(seed=seed))
        return self.kept[size, seed]

    def run(self, size: int, settings: RunSettings | None = None) -> WholeRun:
        """Run the training on `size` ranks; if they hang in a temporary folder, run it once more.

        Raises:
            Undecided: It did not reach anything that can be compared.
            Failed: The ranks did not finish, or made different numbers of steps.
            WorldFailed: Likewise, of functions.
        """
        return self._put_together(size, self.reports(size, settings or RunSettings()))

    def reports(self, size: int, settings: RunSettings) -> Sequence[RankReport]:
        """Return what each rank reports; arguments and errors as of `run`."""
        steps = settings.steps or self.start.steps
        settings = replace(settings, steps=steps, faults=self.start.faults, low_precision=self.low_precision)
        outcome = self.execute(size, settings)
        hung = any(rank.fate is Fate.HUNG for rank in outcome.ranks)
        if hung and not settings.folder and unequal_ends(outcome) is None:
            again = self.execute(size, settings)  # the machine may have been slow
            if again.ok:
                self.unsteady.append(f"{outcome.cause}; run again, it finished. A single hang gives no verdict.")
            outcome = again
        # With faults ranks may issue different collectives, as without a ledger: their results are compared then.
        if not (outcome.all_good if settings.faults else outcome.ok):
            if 0 < len(self.idle) < size and unequal_ends(outcome) is not None:
                raise _actors(self.idle, size, "make all that are compared")
            raise self.start.ending(outcome)
        return outcome.values

    def execute(self, size: int, settings: RunSettings) -> WorldOutcome:
        """Run the training on `size` ranks, and return what these did, however they ended."""
        start, what, began = self._patient(size), _named(size, settings, self.start.variation), time.monotonic()
        # Ranks that import these one by one take seconds of the timeout.
        self.pool.expect(__name__, type(start).__module__, *start.modules)
        if self.listener is not None:
            self.listener.started(what)
        # Not in the run's own folder: what is there is what the script has saved.
        marked = replace(settings, marks=self.pool.shared_directory("fsdp-verify-marks-"))
        try:
            with start.prepared(self.pool, marked) as prepared:
                outcome = start.execute(self.pool, size, prepared)
            self.idle[:] = [rank for rank in range(size) if not mark_of(marked, rank).exists()]
        finally:
            shutil.rmtree(marked.marks, ignore_errors=True)
        took = time.monotonic() - began
        if size == 1 and outcome.ok:
            self.seconds.append(took)
        if self.listener is not None:
            self.listener.ended(what, took, outcome)
        return outcome

    def _patient(self, size: int) -> Start:
        return replace(self.start, timeout=self.timeout(size))  # type: ignore[type-var]  # each start is a dataclass

    def _put_together(self, size: int, ranks: Sequence[RankReport]) -> WholeRun:
        self.start.check(ranks)
        counts = [len(rank.steps) for rank in ranks]
        if idle := [number for number, rank in enumerate(ranks) if not rank.trains]:
            trained = {count for count, rank in zip(counts, ranks) if rank.trains}
            if len(trained) == 1:
                raise _actors(idle, size, f"make {trained.pop()}")
        if len(set(counts)) > 1 and any(rank.joins for rank in ranks):
            raise Undecided(_JOINS.format(f": {', '.join(map(str, counts))}", min(counts) - 1))
        if len(set(counts)) > 1:
            raise Failed(
                f"make different numbers of optimizer steps: {', '.join(map(str, counts))}. Cause: a rank decides by "
                f"its own number to stop or skip a step (an early stop on a local value, an uneven number of "
                f"batches, a branch that depends on "
                "the rank).",
                subject="the ranks",
            )
        return whole(size, ranks)


_JOINS = (
    "ranks make different numbers of optimizer steps{}, which torch's Join allows. Compare steps in which all have rows: "
    "--steps {} at most."
)


def _actors(idle: Sequence[int], size: int, others: str) -> Undecided:
    return Undecided(
        f"give no verdict: rank(s) {', '.join(map(str, idle))} of {size} run no backward pass and make no step, while the "
        f"others {others}. Actors beside a learner are not compared with one process. Check the learner's own loop, or look "
        "for a branch that keeps these ranks from training."
    )


def unequal_ends(outcome: WorldOutcome) -> Failed | Undecided | None:
    """Return what is wrong if some ranks made all steps and were ended while others wait for them; otherwise None."""
    ended = [rank for rank in outcome.ranks if isinstance(rank.value, RankReport) and not rank.value.ended]
    if not ended or len(ended) == outcome.size:
        return None
    if any(rank.value.joins for rank in ended):
        steps = len(ended[0].value.steps) - 1
        return Undecided(_JOINS.format(", as some have no more rows", steps))
    waiting = next(rank.rank for rank in outcome.ranks if rank not in ended)
    return Failed(
        f"make different numbers of optimizer steps: rank {ended[0].rank} has made {len(ended[0].value.steps)}, "
        f"rank {waiting} fewer. Cause: a rank decides by its own number to skip a step, takes different batches, or steps for "
        "all and sends nobody the weights.",
        subject="the ranks",
    )


def _named(size: int, run: RunSettings, variation: str) -> str:
    who = "one process" if size == 1 else f"{size} ranks"
    how = [variation] if variation else []
    how += [f"stopped before step {run.stop_before}"] if run.stop_before else []
    how += ["resumed"] if run.folder and not run.stop_before and not run.faults else []
    how += [f"with {fault}" for fault in run.faults]
    how += ["given the rows of all ranks"] if run.feed.source is not None else []
    how += ["streams recorded"] if run.streams else []
    how += [] if run.low_precision else ["in float32"]
    how += [] if run.late else ["results delivered at once"]
    how += [] if run.garbage else ["fresh memory not filled"]
    how += [f"how far roundings move it ({run.seed})"] if run.seed else []
    return ", ".join([who, *how])
