"""Traces a case: the engine's own program, run on ranks while it is recorded."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import nn

from fsdp_testing.adapters import registry
from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.adapters.shared import naming
from fsdp_testing.cases.records import Case, RankObservation
from fsdp_testing.cases.records.event import Event, History
from fsdp_testing.errors import WorldFailed
from fsdp_testing.explain.trace.recorder import TraceRecorder, watch_modules, watch_waits
from fsdp_testing.judging.case_runner import CaseRunner
from fsdp_testing.oracle.execute import RankProgram
from fsdp_testing.ranks.ledger import interception
from fsdp_testing.ranks.pool import Failed, WorldOutcome
from fsdp_testing.ranks.pool.world import current_world

Units = list[tuple[str, tuple[str, ...]]]
OnRanks = Callable[..., list[Any]]
"""Calls a function with arguments on `size` ranks of a backend and returns what each gave, as `CaseRunner.on_ranks` does."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The history of one case, the units (FQN, parameter FQNs) in the implementation's order by rank, and what each saw."""

    implementation: str
    case: Case
    history: History
    units: tuple[tuple[tuple[str, tuple[str, ...]], ...], ...]
    observations: tuple[RankObservation, ...] = ()


def trace(name: str, case: Case, on_ranks: OnRanks | None = None) -> Trace:
    """Run `case` through implementation `name` and return what every rank did.

    Raises:
        WorldFailed: The case did not run to its end on every rank; the message is the account of every rank.
    """
    on_ranks = on_ranks or CaseRunner().on_ranks
    world = case.world
    try:
        traces = on_ranks(trace_case, registry.adapter_of(name), case, size=world.size, backend=world.backend)
    except WorldFailed as failed:
        if isinstance(failed.outcome, WorldOutcome):
            raise _failed(name, case, failed.outcome) from failed
        raise
    history = History(tuple(traced.events for traced in traces))
    observations = tuple(traced.observation for traced in traces)
    return Trace(name, case, history, tuple(traced.units for traced in traces), observations)


def _failed(name: str, case: Case, outcome: WorldOutcome) -> WorldFailed:
    errors = [r.value.observation.error for r in outcome.ranks if isinstance(r.value, RankTrace)]
    text = "\n".join(f"{error.type_name}: {error.message}" for error in errors if error is not None)
    return WorldFailed(f"{name} did not run {case.identity} to its end: {text or outcome.describe()}", outcome)


# ------------------------------------------------------------------------------------------------ on a rank


@dataclass(frozen=True, slots=True)
class RankTrace:
    """What one rank did: its events, and the units in the implementation's own order, each with its parameters."""

    events: tuple[Event, ...]
    units: tuple[tuple[str, tuple[str, ...]], ...]
    observation: RankObservation


def trace_case(adapter: Adapter, case: Case, observe_all: bool = False) -> RankTrace | Failed:
    """Run `case` through the implementation on this rank and record what happens.

    Args:
        adapter: The implementation.
        case: The case.
        observe_all: Take a snapshot after every operation; for adapters that observe locally, whose snapshots are no events.

    Collectives: those of the implementation; every rank of the world runs the same call.
    """
    program = _TimedProgram(case, adapter, current_world().rank)
    recorder = program.recorder
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings decide nothing, as in judged programs
        units: Units = []
        program.adapter = _watching_after_wrap(adapter, recorder, stack, units)
        stack.enter_context(interception.listen(recorder.collective))
        stack.enter_context(watch_waits(recorder))
        observation = program.run(observe_all=observe_all)
    adapter.finish(program.model)
    traced = RankTrace(recorder.events, tuple(units), observation)
    return traced if observation.error is None else Failed(traced)


class _TimedProgram(RankProgram):
    """A program that informs its recorder when each operation begins."""

    def __init__(self, case: Case, adapter: Adapter, rank: int) -> None:
        self._index = -1
        self.recorder = TraceRecorder(lambda: self._index)
        super().__init__(case, adapter, rank)

    @property
    def index(self) -> int:
        return self._index

    @index.setter
    def index(self, index: int) -> None:
        self._index = index
        self.recorder.operation()


def _watching_after_wrap(adapter: Adapter, recorder: TraceRecorder, stack: ExitStack, units: Units) -> Adapter:
    """Return the adapter, with a `wrap` that switches unit and module sources on as soon as there is a model.

    It records the units at that moment: later some may show full parameters, whose names an adapter need not know.
    """
    original: Callable[..., nn.Module] = adapter.wrap

    def wrap(module: nn.Module, setup: Any) -> nn.Module:
        # By identity where a module was there before: a wrapper's prefix may look like a name of the model.
        before = {inner: fqn for fqn, inner in module.named_modules()}
        model = original(module, setup)
        units.extend((unit, tuple(fqns)) for unit, fqns in adapter.units(model))
        stack.enter_context(adapter.trace_units(model, recorder.unit))
        names = {inner: before.get(inner, naming.original(fqn)) for fqn, inner in model.named_modules()}
        stack.enter_context(watch_modules(recorder, names))
        return model

    return dataclasses.replace(adapter, wrap=wrap)
