"""Checks what the ranks did against the rules of sharding. Pure functions of recorded events: no number shows these faults.

Each rule reads the events of all ranks and returns the first thing that is wrong, as a sentence with its place. Every unit has
a life cycle: memory is gathered once before it is freed again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fsdp_testing.cases.records import (
    AutogradEvent,
    Case,
    CollectiveEvent,
    Event,
    FailureKind,
    Finding,
    History,
    Measure,
    OperationAccount,
    RankObservation,
    UnitEvent,
)
from fsdp_testing.cases.records.observation import GATHERS, REDUCTIONS, wire_bytes
from fsdp_testing.errors import HarnessError
from fsdp_testing.judging.checkers.event_order import ranks_agree
from fsdp_testing.judging.checkers.explain import finding, overrun_finding
from fsdp_testing.judging.checkers.overruns import CommunicationBudget, first_overrun


@dataclass(frozen=True, slots=True)
class BrokenRule:
    """A rule that one rank's history breaks, and the sentence about it."""

    rank: int
    unit: str
    operation: int
    sentence: str


def check_lifecycle(history: History) -> tuple[BrokenRule, ...]:
    """Return a violation of this rule: a free comes between two gathers, and no free without a gather."""
    broken: list[BrokenRule] = []
    for rank in range(len(history.ranks)):
        gathered: dict[str, int] = {}
        for event in history.units(rank):
            name = event.unit or "(root)"
            if event.transition == "gather":
                if event.unit in gathered:
                    sentence = f"unit {name} is gathered again while it holds its full parameters"
                    broken.append(BrokenRule(rank, event.unit, event.operation, sentence))
                gathered[event.unit] = event.operation
            elif event.transition == "free" and gathered.pop(event.unit, None) is None:
                sentence = f"unit {name} is freed though it was not gathered"
                broken.append(BrokenRule(rank, event.unit, event.operation, sentence))
    return tuple(broken)


def unsharded_before(history: History, operation: int) -> dict[str, tuple[int, ...]]:
    """Return units (FQN, the root's is empty) that are gathered when `operation` begins, with the ranks, in order."""
    by_unit: dict[str, list[int]] = {}
    for rank in range(len(history.ranks)):
        gathered: dict[str, bool] = {}
        for event in history.units(rank):
            # The last transition before the operation decides; transitions during it come too late.
            if event.operation < operation and event.transition in ("gather", "free"):
                gathered[event.unit] = event.transition == "gather"
        for unit in sorted(unit for unit, open_now in gathered.items() if open_now):
            by_unit.setdefault(unit, []).append(rank)
    return {unit: tuple(ranks) for unit, ranks in by_unit.items()}


Units = tuple[tuple[str, tuple[str, ...]], ...]
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class TracedObservation(RankObservation):
    """The report of a rank with a trace: events, units with their parameters, shapes of parameters."""

    events: tuple[Event, ...] = ()
    units: Units = ()
    shapes: Mapping[str, tuple[int, ...]] | None = None

    @property
    def named(self) -> list[str]:
        """Units with parameters."""
        return [unit for unit, fqns in self.units if fqns]


Rule = Callable[[Case, Sequence[TracedObservation]], Finding | None]


def review(rules: Sequence[Rule], case: Case, ranks: Sequence[RankObservation]) -> Finding | None:
    """Return the first violation of one of `rules`; ranks without a trace are not judged."""
    traced = [rank for rank in ranks if isinstance(rank, TracedObservation)]
    if len(traced) < len(ranks):
        return None
    return next((broken for rule in rules if (broken := rule(case, traced)) is not None), None)


def _broken(case: Case, rank: int, operation: int, sentence: str) -> Finding:
    statement = f"{sentence}, on rank {rank}"
    return finding(case, FailureKind.UNCOORDINATED, "order of events", operation, statement, ranks=(rank,))


# ----------------------------------------------------------------------------------------------- the rules


def same_collectives(case: Case, ranks: Sequence[TracedObservation]) -> Finding | None:
    """Every rank issues the same collectives in the same order."""
    difference = ranks_agree(History(tuple(rank.events for rank in ranks)))
    return _broken(case, 0, -1, f"ranks disagree: {difference}") if difference else None


def gathered_once(case: Case, ranks: Sequence[TracedObservation]) -> Finding | None:
    """A unit is gathered and freed in turn."""
    broken = check_lifecycle(History(tuple(rank.events for rank in ranks)))
    return _broken(case, broken[0].rank, broken[0].operation, broken[0].sentence) if broken else None


def all_freed(case: Case, ranks: Sequence[TracedObservation]) -> Finding | None:
    """After a backward no unit is unsharded."""
    return _overrun(case, ranks, Measure.KEPT_PARAMETERS)


def held_while_used(case: Case, ranks: Sequence[TracedObservation]) -> Finding | None:
    """A module runs forward only while its unit is gathered, and backward only after the unit was gathered again."""
    for rank in ranks:
        uses = list(_uses(rank))
        if not uses and any(event.transition == "free" for event in _units(rank)):
            raise _unseen(rank, "a module with parameters of a unit that is freed")
        for position, event, owner, gathered in uses:
            if owner in gathered:
                continue
            # Backward is seen before its unit is gathered: what comes next for the unit decides, a gather or another free.
            changes = (e.transition for e in rank.events[position:] if isinstance(e, UnitEvent) and e.unit == owner)
            again = next((change for change in changes if change in ("gather", "free")), "") == "gather"
            if event.moment == "post_forward" or not again:
                way = "forward" if event.moment == "post_forward" else "backward"
                sentence = f"{_shown(event.module)} runs {way} while its unit {_shown(owner)} is freed"
                return _broken(case, rank.rank, event.operation, sentence)
    return None


def gathers_needed(case: Case, ranks: Sequence[TracedObservation]) -> Finding | None:
    """Units are gathered once for forward and once for backward, or once for both; nothing more goes on the wire."""
    return _overrun(case, ranks, Measure.UNIT_GATHERS, Measure.GATHERED_BYTES)


def reductions_needed(case: Case, ranks: Sequence[TracedObservation]) -> Finding | None:
    """Gradients are reduced once for every unit, and not at all inside no_sync."""
    return _overrun(case, ranks, Measure.REDUCTIONS)


def _overrun(case: Case, ranks: Sequence[TracedObservation], *measures: Measure) -> Finding | None:
    """The rules that accounts are judged by in every case, applied to the accounts of the trace."""
    units = ranks[0].named
    budget = CommunicationBudget(1, _padded_bytes(case, ranks[0]), len(units), casts=False)
    accounts = [accounts_of(case, rank, units) for rank in ranks]
    overrun = first_overrun(case, accounts, budget, measures)
    return None if overrun is None else overrun_finding(case, overrun)


def accounts_of(case: Case, traced: TracedObservation, units: Collection[str]) -> list[OperationAccount]:
    """Return what each operation put on the wire and left unsharded, by the events of one rank.

    Messages of cut modules among the ranks of one model are left out.
    """
    unsharded: dict[str, int] = {}
    one_model = case.world.of_one_model(traced.rank)
    events = [e for e in traced.events if not (isinstance(e, CollectiveEvent) and e.group == one_model)]
    accounts: list[OperationAccount] = []
    for index in range(-1, len(case.program)):
        now = [event for event in events if event.operation == index]
        changes = [event for event in now if isinstance(event, UnitEvent) and event.unit in units]
        for event in changes:
            if event.transition == "gather":
                unsharded[event.unit] = 0
            elif event.transition == "free":
                unsharded.pop(event.unit, None)
        accounts.append(
            OperationAccount(
                index,
                backward=index >= 0 and case.program[index].runs_backward,
                gathered=tuple(event.unit for event in changes if event.transition == "gather"),
                held=tuple(sorted(unsharded.items())),
                gather_bytes=_wire(now, GATHERS),
                reduction_bytes=_wire(now, REDUCTIONS),
            )
        )
    return accounts


def _wire(events: Sequence[Event], names: tuple[str, ...]) -> tuple[int, ...]:
    issued = [event for event in events if isinstance(event, CollectiveEvent) and event.name.startswith(names)]
    return tuple(wire_bytes(event.dtype, event.numel) for event in issued)


def within_memory(case: Case, ranks: Sequence[TracedObservation]) -> Finding | None:
    """Never more full parameters are unsharded than the strategy promises.

    With `full_shard` those of the unit that runs, of the units around it, and of one unit gathered ahead.
    """
    for rank in ranks:
        sizes = {unit: sum(math.prod(_shape(rank, fqn)) for fqn in fqns) for unit, fqns in rank.units}
        everything, largest = sum(sizes.values()), max(sizes.values(), default=0)
        most = everything if case.strategy == "shard_grad_op" else _chain(sizes) + largest
        unsharded: dict[str, int] = {}
        for event in _units(rank):
            if event.transition == "gather":
                unsharded[event.unit] = sizes.get(event.unit, 0)
            elif event.transition == "free":
                unsharded.pop(event.unit, None)
            if sum(unsharded.values()) > most:
                names = ", ".join(_shown(unit) for unit in unsharded)
                sentence = (
                    f"{sum(unsharded.values())} elements are held in full ({names}), the strategy promises {most}"
                )
                return _broken(case, rank.rank, event.operation, sentence)
    return None


def in_order(case: Case, ranks: Sequence[TracedObservation]) -> Finding | None:
    """Units are gathered in the order in which they run, and for backward in the reverse order in which they ended."""
    for rank in ranks:
        for operation in _passes(case)[1:]:
            forward, backward = _orders(rank, operation)
            got = [e.unit for e in _units(rank, operation) if e.transition == "gather" and e.unit in rank.named]
            if got and not forward:
                raise _unseen(rank, "a unit that is gathered")
            first, then = got[: len(forward)], iter(backward)
            # Whether a unit is gathered again for backward is another rule's; here, in which order.
            if got and (first != forward or not all(unit in then for unit in got[len(forward) :])):
                order, wanted = ", ".join(map(_shown, got)), ", ".join(map(_shown, (*forward, *backward)))
                sentence = f"units are gathered in the order {order}; they run in {wanted}"
                return _broken(case, rank.rank, operation, sentence)
    return None


# ----------------------------------------------------------------------------------------------- readers


def _passes(case: Case) -> list[int]:
    """Operations with a backward that reduces."""
    kinds = [(operation.kind, getattr(operation, "no_sync", False)) for operation in case.program]
    return [index for index, kind in enumerate(kinds) if kind == ("forward_backward", False)]


def _units(rank: TracedObservation, operation: int | None = None) -> list[UnitEvent]:
    events = [event for event in rank.events if isinstance(event, UnitEvent)]
    return [event for event in events if operation is None or event.operation == operation]


def _uses(rank: TracedObservation) -> Iterator[tuple[int, AutogradEvent, str, set[str]]]:
    """`(place, event, unit, gathered units)` where a module with parameters of its own has run or is about to."""
    owner = {fqn.rpartition(".")[0]: unit for unit, fqns in rank.units for fqn in fqns}
    freeing = {event.unit for event in _units(rank) if event.transition == "free"}
    gathered: set[str] = set()
    last: dict[str, str] = {}
    for position, event in enumerate(rank.events):
        if isinstance(event, UnitEvent):
            # In the order of events: what is gathered at a use is what was gathered before it and not freed since.
            if event.transition == "gather":
                gathered.add(event.unit)
            elif event.transition == "free":
                gathered.discard(event.unit)
        elif isinstance(event, AutogradEvent) and event.module in owner:
            # A wrapper runs as well under the name of its module: the innermost is the one that computes.
            inner = event.moment == "post_forward" and last.get(event.module) == "pre_forward"
            last[event.module] = event.moment
            if owner[event.module] in freeing and (inner or event.moment == "pre_backward"):
                yield position, event, owner[event.module], set(gathered)


def _orders(rank: TracedObservation, operation: int) -> tuple[list[str], list[str]]:
    """Units with parameters in the order in which they begin forward, and in the reverse of that in which they end."""
    named = rank.named
    events = [e for e in rank.events if isinstance(e, AutogradEvent) and e.operation == operation and e.module in named]
    began = dict.fromkeys(event.module for event in events if event.moment == "pre_forward")
    ended = dict.fromkeys(event.module for event in reversed(events) if event.moment == "post_forward")
    return list(began), list(ended)


def _shape(rank: TracedObservation, fqn: str) -> tuple[int, ...]:
    return (rank.shapes or {}).get(fqn, ())


def _padded_bytes(case: Case, rank: TracedObservation) -> int:
    """All parameters, each padded on its first dimension to a multiple of the ranks, and each unit to 16 bytes a rank."""
    size, total = case.world.size, 0
    for _, fqns in rank.units:
        for fqn in fqns:
            shape = _shape(rank, fqn) or (1,)
            total += wire_bytes(case.model.dtype, -(-shape[0] // size) * size * math.prod(shape[1:]))
        total += size * 16
    return total


def _chain(sizes: Mapping[str, int]) -> int:
    """Elements of the longest chain of units one inside another."""

    def around(unit: str) -> int:
        return sum(size for outer, size in sizes.items() if outer in ("", unit) or unit.startswith(f"{outer}."))

    return max((around(unit) for unit in sizes), default=0)


def _unseen(rank: TracedObservation, what: str) -> HarnessError:
    """Nothing can be said: the modules that ran are not known by the names that the units have."""
    return HarnessError(
        f"trace of rank {rank.rank}: expected to see {what} run, got only modules with other names. Let `units` give "
        "the names of modules before wrapping, and wrap the modules themselves; or do not claim `unit_trace`."
    )


def _shown(name: str) -> str:
    return name or "(root)"
