"""Traces a case: the engine's own program, run on ranks while each collects its events in one recorder.

Each event costs the training rank one time stamp and one tuple; `Event` objects are made on request.

Modules and waits are watched from outside, through public hooks and `Work.wait`; the graph is not changed. Waits inside C++
(DDP's reducer) are not recorded.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from fsdp_testing.adapters import registry
from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.adapters.shared import naming
from fsdp_testing.cases.records import Case, RankObservation
from fsdp_testing.cases.records.event import (
    AutogradEvent,
    CollectiveEvent,
    Event,
    History,
    OperationEvent,
    UnitEvent,
    WaitEvent,
)
from fsdp_testing.errors import WorldFailed
from fsdp_testing.judging.case_runner import CaseRunner
from fsdp_testing.oracle.execute import RankProgram
from fsdp_testing.ranks.ledger import interception
from fsdp_testing.ranks.ledger.recorder import Call, GroupIdentity
from fsdp_testing.ranks.pool import Failed, WorldOutcome
from fsdp_testing.ranks.pool.world import current_world

#: What an adapter's `trace_units` calls for each transition: unit FQN, transition, parameter FQNs.
EmitUnit = Callable[[str, str, tuple[str, ...]], None]

_Maker = Callable[..., Event]


class TraceRecorder:
    """Events of one rank in the order they happened.

    Args:
        operation: Returns the index of the program's operation that runs now.
    """

    def __init__(self, operation: Callable[[], int]) -> None:
        self._operation = operation
        self._recorded: list[tuple[_Maker, float, int, tuple[Any, ...]]] = []
        self._made: list[Event] = []

    @property
    def events(self) -> tuple[Event, ...]:
        for sequence, (make, moment, operation, facts) in enumerate(self._recorded[len(self._made) :], len(self._made)):
            self._made.append(make(sequence, moment, operation, *facts))
        return tuple(self._made)

    def __len__(self) -> int:
        return len(self._recorded)

    def collective(self, group: GroupIdentity, call: Call, site: str) -> None:
        """Record a collective; the ledger's listener."""
        self._recorded.append((_collective, time.monotonic(), self._operation(), (group, call, site)))

    def unit(self, unit: str, transition: str, parameters: tuple[str, ...] = ()) -> None:
        """Record a transition of a unit: `unshard`, `gather`, `reshard`, `free`."""
        self._recorded.append((UnitEvent, time.monotonic(), self._operation(), (unit, transition, parameters)))

    def autograd(self, module: str, moment: str) -> None:
        """Record that a module's forward or backward begins or ends."""
        self._recorded.append((AutogradEvent, time.monotonic(), self._operation(), (module, moment)))

    def operation(self) -> None:
        self._recorded.append((OperationEvent, time.monotonic(), self._operation(), ()))

    def waited(self, start: float, stop: float) -> None:
        """Record that this rank waited for a collective from `start` to `stop`."""
        self._recorded.append((WaitEvent, start, self._operation(), (stop - start,)))


def _collective(
    sequence: int, moment: float, operation: int, group: GroupIdentity, call: Call, site: str
) -> CollectiveEvent:
    what: tuple[Any, ...] = (*call.what, None, None)
    name, detail, *rest = what
    root = next((part for part in detail or () if isinstance(part, int)), -1)
    reduce_op = next((part for part in detail or () if isinstance(part, str)), "")
    sizes = rest[1]
    return CollectiveEvent(
        sequence,
        moment,
        operation,
        name=name,
        group=group.members,
        dtype=str(rest[0] or ""),
        numel=sum(sizes) if isinstance(sizes, tuple) else int(sizes or 0),
        reduce_op=reduce_op,
        root=root,
        call_site=site,
    )


@contextmanager
def watch_modules(recorder: TraceRecorder, names: Mapping[nn.Module, str]) -> Iterator[None]:
    """Record pre_forward, post_forward and pre_backward of the modules in `names` while the context lasts.

    pre_backward is reported at the first gradient that reaches an output of the module; modules whose outputs need no
    gradient have none.
    """

    def first_gradient(name: str, reported: list[bool]) -> None:
        if not reported:
            reported.append(True)
            recorder.autograd(name, "pre_backward")

    def before(module: nn.Module, _args: Any) -> None:
        if module in names:
            recorder.autograd(names[module], "pre_forward")

    def after(module: nn.Module, _args: Any, output: Any) -> None:
        if module not in names:
            return
        recorder.autograd(names[module], "post_forward")
        reported: list[bool] = []
        # Most modules return one tensor; walking a tree with one leaf costs more than everything else here.
        for leaf in (output,) if isinstance(output, torch.Tensor) else tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _grad, name=names[module]: first_gradient(name, reported))

    handles = [register_module_forward_pre_hook(before), register_module_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def watch_waits(recorder: TraceRecorder) -> Iterator[None]:
    """Record every wait for a collective while the context lasts."""
    original = dist.Work.wait

    def wait(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        start = time.monotonic()
        try:
            return original(work, *args, **kwargs)
        finally:
            recorder.waited(start, time.monotonic())

    with mock.patch.object(dist.Work, "wait", wait):
        yield


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
