"""Turns a history into data for drawings: stretches of time, bytes held, and the elements on each rank.

Pure but for `take`, which runs the one short program that is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from fsdp_testing.cases.models import MODELS
from fsdp_testing.cases.records import (
    AutogradEvent,
    Batch,
    Case,
    CollectiveEvent,
    Event,
    Forward,
    ForwardBackward,
    HeldSpan,
    LiveBytes,
    ModelSpec,
    OperationEvent,
    ParameterObservation,
    Portrait,
    RankObservation,
    RankPortrait,
    Step,
    Stretch,
    UnitEvent,
    UnitPortrait,
    WaitEvent,
    WorldSpec,
    WrappingPlan,
    ZeroGrad,
)
from fsdp_testing.errors import HarnessError
from fsdp_testing.explain.trace.run import OnRanks, Trace, trace

MODEL = "mlp"
STRATEGIES = ("full_shard", "shard_grad_op", "no_shard")
MOST_STRETCHES = 1000
"""The most stretches of one rank that a picture shows."""

ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def portrait_case(strategy: str, size: int) -> Case:
    """Return the program that is drawn: two iterations with an evaluation in between."""
    return Case(
        model=ModelSpec(MODEL),
        world=WorldSpec(size),
        program=(
            ForwardBackward(Batch(1)),
            Step(),
            ZeroGrad(),
            Forward(Batch(2), mode="no_grad"),
            ForwardBackward(Batch(3)),
            Step(),
        ),
        strategy=strategy,
        wrapping=WrappingPlan(units=MODELS[MODEL].units),
    )


def take(name: str, case: Case, on_ranks: OnRanks) -> Portrait:
    """Run `case` on implementation `name` and draw it; a run that fails leaves a remark and no picture.

    The case runs twice: the first run allocates, connects and imports, which must not be in the drawing.
    """
    try:
        trace(name, case, on_ranks)
        return portrait_of(trace(name, case, on_ranks))
    except Exception as error:  # noqa: BLE001 - what cannot be drawn is said in the picture's place; no verdict hangs on it
        kind = "" if isinstance(error, HarnessError) else f"{type(error).__name__}: "
        return Portrait(name, case, remark=f"{kind}{next(iter(str(error).splitlines()), 'no picture')}")


def portrait_of(traced: Trace) -> Portrait:
    """Return the portrait of a run that was traced."""
    units = _units(traced)
    events = traced.history.ranks
    begin = min((event.time for rank in events for event in rank if event.operation >= 0), default=0.0)
    stops = (event.time + (event.seconds if isinstance(event, WaitEvent) else 0.0) for rank in events for event in rank)
    end = max(stops, default=begin)
    names = {unit for unit, _ in traced.units[0]} if traced.units else set()
    sizes = {unit.unit: unit.elements * unit.element_bytes for unit in units}
    bound, text = _bound(traced.case.strategy, units)
    return Portrait(
        implementation=traced.implementation,
        case=traced.case,
        seconds=end - begin,
        ranks=tuple(
            RankPortrait(
                rank,
                _shown(
                    [
                        *_operations(own, traced.case, end),
                        *_gathered(own, end),
                        *_computed(own, names, end),
                        *_communicated(own),
                    ],
                    begin,
                ),
                tuple(_live(own, begin, sizes, _shard_bytes(units, rank))),
            )
            for rank, own in enumerate(events)
        ),
        units=units,
        bound_bytes=bound,
        bound_text=text,
    )


# ------------------------------------------------------------------------------------------------ layout
def _units(traced: Trace) -> tuple[UnitPortrait, ...]:
    parameters = [_parameters(observation) for observation in traced.observations]
    if not parameters or not traced.units:
        return ()
    return tuple(_unit(name, fqns, parameters) for name, fqns in traced.units[0])


def _parameters(observation: RankObservation) -> Mapping[str, ParameterObservation]:
    return observation.snapshots[-1].parameters if observation.snapshots else {}


def _unit(name: str, fqns: Sequence[str], ranks: Sequence[Mapping[str, ParameterObservation]]) -> UnitPortrait:
    by_fqn = [next((rank[fqn] for rank in ranks if fqn in rank), None) for fqn in fqns]
    parameters = [parameter for parameter in by_fqn if parameter is not None]
    elements = sum(math.prod(parameter.shape) for parameter in parameters)
    dtype = next((rank[fqn].dtype for fqn in fqns for rank in ranks if fqn in rank and rank[fqn].dtype), "float64")
    spans = tuple(
        tuple(
            HeldSpan(fqn, piece.start, piece.stop)
            for fqn in fqns
            if fqn in rank
            for piece in rank[fqn].pieces
            if piece.stop > piece.start
        )
        for rank in ranks
    )
    return UnitPortrait(name, elements, ITEM_BYTES.get(dtype, 8), spans)


def _shard_bytes(units: Sequence[UnitPortrait], rank: int) -> int:
    """Bytes that `rank` always holds: its shards with their padding."""
    return sum((unit.shard(rank) + unit.padding(rank)) * unit.element_bytes for unit in units)


def _bound(strategy: str, units: Sequence[UnitPortrait]) -> tuple[int, str]:
    """How many bytes of parameters a rank may hold at once, and why."""
    shards = max((_shard_bytes(units, rank) for rank in range(len(units[0].held))), default=0) if units else 0
    whole = {unit.unit: unit.elements * unit.element_bytes for unit in units}
    if strategy == "no_shard":
        return shards, "every rank holds every parameter once"
    if strategy == "shard_grad_op":
        return shards + sum(whole.values()), "the shards and every unit gathered, from forward until backward"
    chain = max((_chain(unit, whole) for unit in whole), default=0)
    prefetched = max((size for unit, size in whole.items() if unit), default=0)
    return min(shards + chain + prefetched, shards + sum(whole.values())), (
        "the shards, a unit with the units around it (torch keeps the root's from forward to backward), "
        "and the largest unit once more for prefetching"
    )


def _chain(unit: str, whole: Mapping[str, int]) -> int:
    """Bytes of `unit` and of the units around it, which stay gathered while it runs."""
    return sum(size for inner, size in whole.items() if not inner or unit == inner or unit.startswith(f"{inner}."))


# ------------------------------------------------------------------------------------------------ time
def _shown(stretches: Sequence[Stretch], begin: float) -> tuple[Stretch, ...]:
    """Stretches since `begin`, in order of their start."""
    shown = sorted((s for s in stretches if s.stop > begin), key=lambda s: (s.start, s.lane))
    return tuple(Stretch(s.lane, max(s.start, begin) - begin, s.stop - begin, s.what) for s in shown[:MOST_STRETCHES])


def _operations(events: Sequence[Event], case: Case, end: float) -> Iterator[Stretch]:
    begun = [event for event in events if isinstance(event, OperationEvent) and event.operation >= 0]
    for event, after in zip(begun, [*begun[1:], None]):
        stop = after.time if after is not None else end
        if event.operation < len(case.program):
            yield Stretch("operation", event.time, stop, case.program[event.operation].words())


def _gathered(events: Sequence[Event], end: float) -> Iterator[Stretch]:
    since: dict[str, float] = {}
    for event in events:
        if isinstance(event, UnitEvent) and event.transition == "gather":
            since.setdefault(event.unit, event.time)
        elif isinstance(event, UnitEvent) and event.transition == "free" and event.unit in since:
            yield Stretch("gathered", since.pop(event.unit), event.time, event.unit)
    for unit, start in since.items():
        yield Stretch("gathered", start, end, unit)


def _computed(events: Sequence[Event], units: set[str], end: float) -> Iterator[Stretch]:
    """Forward of the innermost unit that runs; backward of a unit until the next one's begins or the operation ends."""
    inside: list[str] = []
    start = 0.0
    backward: tuple[str, float] | None = None
    for event in events:
        if isinstance(event, OperationEvent) and backward is not None:
            yield Stretch("backward", backward[1], event.time, backward[0])
            backward = None
        if not isinstance(event, AutogradEvent) or event.module not in units:
            continue
        if event.moment == "pre_backward":
            if backward is not None:
                yield Stretch("backward", backward[1], event.time, backward[0])
            backward = (event.module, event.time)
        elif event.moment in ("pre_forward", "post_forward"):
            if inside:
                yield Stretch("forward", start, event.time, inside[-1])
            inside = [*inside, event.module] if event.moment == "pre_forward" else inside[:-1]
            start = event.time
    if backward is not None:
        yield Stretch("backward", backward[1], end, backward[0])


def _communicated(events: Sequence[Event]) -> Iterator[Stretch]:
    """Yield collectives from their issue to the wait that follows them; waits."""
    open_ones: list[CollectiveEvent] = []
    for event in events:
        if isinstance(event, CollectiveEvent):
            open_ones.append(event)
        elif isinstance(event, WaitEvent):
            stop = event.time + event.seconds
            if open_ones:
                first = open_ones.pop(0)
                yield Stretch("collective", first.time, stop, collective_text(first))
            yield Stretch("wait", event.time, stop, "for the other ranks")
    for event in open_ones:
        yield Stretch("collective", event.time, event.time, collective_text(event))


def collective_text(event: CollectiveEvent) -> str:
    """Return a collective in a few words: all_gather float64[64]."""
    return f"{event.name.removesuffix('_single').removesuffix('_tensor')} {event.dtype}[{event.numel}]"


def _live(events: Sequence[Event], begin: float, sizes: Mapping[str, int], shards: int) -> Iterator[LiveBytes]:
    gathered: set[str] = set()
    yield LiveBytes(0.0, shards)
    for event in events:
        if isinstance(event, UnitEvent) and event.transition in ("gather", "free"):
            gathered = gathered | {event.unit} if event.transition == "gather" else gathered - {event.unit}
            yield LiveBytes(max(event.time - begin, 0.0), shards + sum(sizes.get(unit, 0) for unit in gathered))
