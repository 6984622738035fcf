"""Runs a training on a rank, however it is started, and reports on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.algorithms.join import Join
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp_testing.oracle.execute import filled_with_garbage
from fsdp_testing.ranks.faults.fault import Fault
from fsdp_testing.ranks.faults.injection import inject
from fsdp_testing.ranks.ledger import interception
from fsdp_testing.ranks.ledger.late_delivery import deliver_late
from fsdp_testing.ranks.pool.world import current_world
from fsdp_testing.ranks.streams.observation import observe
from fsdp_testing.ranks.streams.races import StreamAccount
from fsdp_testing.train.conventions import Follower
from fsdp_testing.train.disturbance import disturbed
from fsdp_testing.train.feed import Feed, Feeder, Taken
from fsdp_testing.train.holdings import Spans, begin_with
from fsdp_testing.train.low_precision import watched
from fsdp_testing.train.observation import Observer
from fsdp_testing.train.quantities import QuantitySpans
from fsdp_testing.train.reading import Reader
from fsdp_testing.train.steps import StepSeen
from fsdp_testing.train.surroundings import Log, as_torchrun_starts


@dataclass(frozen=True, slots=True)
class RunSettings:
    """The settings of one run, however it is started.

    Attributes:
        steps: Optimizer steps after which it is ended; 0 means never.
        stop_before: Step before which it is ended; 0 means never.
        folder: Current folder of the run; empty without its own folder.
        marks: Folder in which each rank that trains makes a file; empty without.
        arguments: Further arguments of a script.
        seed: If not 0, roundings are made differently.
        keep_data: Whether to report the data that was taken.
        feed: The data that replaces its own.
        streams: Whether its streams are recorded; then nothing else is.
        faults: Injected faults.
        low_precision: Whether low precision stays where the training asks for it.
        late: Whether asynchronous collectives deliver as late as allowed.
        garbage: Whether fresh memory holds garbage.
    """

    steps: int = 0
    stop_before: int = 0
    folder: str = ""
    marks: str = ""
    arguments: tuple[str, ...] = ()
    seed: int = 0
    keep_data: bool = False
    feed: Feed = field(default_factory=Feed)
    streams: bool = False
    faults: tuple[Fault, ...] = ()
    low_precision: bool = True
    late: bool = True
    garbage: bool = True


@dataclass(frozen=True, slots=True)
class RankReport:
    """The report of one rank on its run.

    Attributes:
        steps: Each step of an optimizer.
        taken: The data.
        returned: What a function returned, each quantity as a list of steps.
        weights: Parameters when a function has returned.
        numbers: Numbers that a script took out of tensors, by line.
        outside: Files that it wrote elsewhere than below its current folder.
        hosts: Other machines that it asked for.
        copies: Other copies of the weights at the end, by variable name; empty if only the name suggests a copy.
        called: Those of them that are modules which the script called.
        beside: Buffers of modules outside of the models at the end, by the names of variable and buffer.
        idle_passes: Backward passes of a training that steps no optimizer and moves no weight.
        trains: Whether it ran any backward pass, or made a step.
        ended: Whether the training ended on its own.
        dropout_off: Whether dropout was switched off.
        dropout: Whether it would have been active.
        conventions: Names of conventions that it followed.
        account: The work on its streams, if they were recorded.
        low_precision: Whether it asked for autocast or mixed precision.
        settled: Parameters that changed since the last step.
        joins: Whether it entered `torch.distributed.algorithms.Join`, where ranks may make different numbers of steps.
    """

    steps: tuple[StepSeen, ...]
    taken: Taken = field(default_factory=Taken)
    returned: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    weights: Spans = field(default_factory=dict)
    numbers: Log = field(default_factory=dict)
    outside: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    copies: dict[str, Spans] = field(default_factory=dict)
    called: tuple[str, ...] = ()
    beside: Spans = field(default_factory=dict)
    idle_passes: int = 0
    trains: bool = True
    ended: bool = True
    dropout_off: bool = False
    dropout: bool = False
    conventions: tuple[str, ...] = ()
    account: StreamAccount | None = None
    low_precision: bool = False
    settled: QuantitySpans = field(default_factory=dict)
    joins: bool = False


Watch = AbstractContextManager[Callable[[], dict[str, Any]]]
"""Watches a running training; yields a function that returns fields of the report afterwards."""


class Job:
    """One way to start a training in a rank; each is a frozen dataclass."""

    def reader(self) -> Reader:
        """Return the reader of this rank's models."""
        return Reader()

    def watch(self, run: RunSettings) -> Watch:
        """Watch what is specific to this way of starting."""
        return nullcontext(dict)

    def train(self, run: RunSettings, observer: Observer) -> dict[str, Any]:
        """Train to the end; return fields of the report. Collectives: those of the training."""
        raise NotImplementedError


class EnoughSteps(BaseException):
    """Ends a training from inside after so many steps; no `except Exception` of it takes it."""


def run_here(job: Job, run: RunSettings) -> RankReport:
    """Run a training in this rank and return its report.

    Collectives: those of the training; all ranks of the world must join.
    """
    world = current_world()
    if run.streams:
        return _with_streams_recorded(job, run)
    feeder = Feeder(replace(run.feed, rank=world.rank if world.size > 1 else run.feed.rank), run.keep_data)
    follower = Follower(run.feed.ranks)
    observer = _observer(job, run, feeder, follower)
    with ExitStack() as stack:
        facts = stack.enter_context(job.watch(run))
        low_precision = stack.enter_context(watched(is_on=run.low_precision))
        joins = stack.enter_context(_joins())
        for context in (
            as_torchrun_starts(world),
            interception.listen(observer.see_collective),
            # Before the observer, which must see the gradients that a fault has changed.
            _faulty(run.faults, world.rank) if run.faults else nullcontext(),
            observer.watch(),
            feeder.watch(),
            follower.watch(),
            # These two rule out lucky passes.
            deliver_late() if run.late else nullcontext(),
            filled_with_garbage() if run.garbage else nullcontext(),
            disturbed(run.seed * world.size + world.rank, observer.see_operation) if run.seed else nullcontext(),
        ):
            stack.enter_context(context)
        ending = job.train(run, observer)
    observer.finish()
    feeder.finish()
    taken = feeder.taken
    taken.calls = observer.calls
    if not run.keep_data:
        taken.marked.clear()
    conventions, idle_passes = tuple(sorted(follower.seen)), observer.idle_passes()
    if "returned" in ending:
        ending["weights"] = observer.reader.in_models(whole=True)
    return RankReport(
        tuple(observer.steps),
        taken,
        conventions=conventions,
        idle_passes=idle_passes,
        trains=observer.trains(),
        low_precision=bool(low_precision),
        settled=observer.settled() if world.size > 1 else {},
        joins=bool(joins),
        **facts(),
        **ending,
    )


def _with_streams_recorded(job: Job, run: RunSettings) -> RankReport:
    """Record streams, and end the training in time; reading values besides would wait for the work that makes them.

    Results are not delivered late and memory is not filled with garbage: a device makes no such writes.
    """
    world, steps = current_world(), Counter[int]()

    def count(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if run.steps and steps[id(optimizer)] >= run.steps:
            raise EnoughSteps
        steps[id(optimizer)] += 1

    with ExitStack() as stack:
        stack.callback(register_optimizer_step_pre_hook(count).remove)
        stack.enter_context(job.watch(run))
        stack.enter_context(as_torchrun_starts(world))
        history = stack.enter_context(observe(world.device))
        job.train(run, Observer())
    return RankReport((), account=StreamAccount.of(history))


@contextmanager
def _faulty(faults: tuple[Fault, ...], rank: int) -> Iterator[None]:
    """Inject faults, and let disagreeing ranks go on, as they do without a ledger."""
    with mock.patch.object(interception.active_recorder(), "compare", False):
        injection = inject(faults, rank)
        try:
            yield
        finally:
            injection.end()


@contextmanager
def _joins() -> Iterator[list[Join]]:
    """Yield the contexts of `Join` that are entered."""
    enter: Callable[[Join], None] = Join.__enter__
    entered: list[Join] = []

    def enter_seen(context: Join) -> None:
        entered.append(context)
        enter(context)

    with mock.patch.object(Join, "__enter__", enter_seen):
        yield entered


def _observer(job: Job, run: RunSettings, feeder: Feeder, follower: Follower) -> Observer:
    """Return the observer, which ends the training in time and replaces its data and forwards."""

    def stop(steps: int) -> None:
        if run.steps and steps >= run.steps:
            raise EnoughSteps

    def stop_before(steps: int) -> None:
        observer.on_training()
        feeder.end_step()
        follower.look()
        if run.stop_before and steps >= run.stop_before:
            raise EnoughSteps

    def forward(model: torch.nn.Module, call: Any, given: Any, place: Any) -> Any:
        # The weights of a model that is made later may depend on the training.
        early = not observer.steps
        if run.feed.weights and early and not any(model is known for known in observer.reader.models):
            begin_with(run.feed.weights, model, len(observer.reader.models))
        return follower.forward(model, call, given, place)

    observer = Observer(stop, feeder.forward, stop_before, forward, job.reader())
    observer.keep_calls, observer.loss_scale = run.keep_data, run.feed.scale
    if run.marks:
        observer.on_training = mark_of(run, current_world().rank).touch
    return observer


def mark_of(run: RunSettings, rank: int) -> Path:
    """Return the file that a rank makes when it trains."""
    return Path(run.marks, str(rank))
