"""The rules over traces find each broken promise, and nothing in a trace that keeps them all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdp_testing.cases.records import (
    AutogradEvent,
    Batch,
    Case,
    CollectiveEvent,
    ForwardBackward,
    ModelSpec,
    RankObservation,
    UnitEvent,
    WorldSpec,
)
from fsdp_testing.errors import HarnessError
from fsdp_testing.judging.checkers import event_rules
from fsdp_testing.judging.checkers.event_rules import TracedObservation

UNITS = (("", ()), ("a", ("a.weight",)), ("b", ("b.weight",)))
SHAPES = {"a.weight": (4, 4), "b.weight": (4, 4)}
ALL = (
    event_rules.same_collectives,
    event_rules.gathered_once,
    event_rules.all_freed,
    event_rules.held_while_used,
    event_rules.gathers_needed,
    event_rules.reductions_needed,
    event_rules.within_memory,
    event_rules.in_order,
)


def case(strategy="full_shard", passes=2):
    program = tuple(ForwardBackward(Batch(seed)) for seed in range(passes))
    return Case(ModelSpec("mlp"), WorldSpec(2), program, strategy=strategy)


def unit(name, transition, operation):
    return UnitEvent(0, 0.0, operation, name, transition)


def module(name, moment, operation):
    return AutogradEvent(0, 0.0, operation, name, moment)


def wire(name, operation, numel=16, dtype="float64"):
    return CollectiveEvent(0, 0.0, operation, name, (0, 1), dtype, numel)


def one_pass(operation):
    """A full_shard pass over two units, as it should be."""
    events = []
    for name in ("a", "b"):
        events += [wire("all_gather_single", operation), unit(name, "gather", operation)]
        events += [module(name, "pre_forward", operation), module(name, "post_forward", operation)]
        events += [unit(name, "free", operation)]
    for name in ("b", "a"):
        events += [module(name, "pre_backward", operation)]
        events += [wire("all_gather_single", operation), unit(name, "gather", operation), unit(name, "free", operation)]
        events += [wire("reduce_scatter_single", operation)]
    return events


def ranks(*changes):
    """Two ranks whose second pass is changed."""
    events = [*one_pass(0), *one_pass(1)]
    for change in changes:
        events = change(events)
    return [TracedObservation(rank, events=tuple(events), units=UNITS, shapes=SHAPES) for rank in range(2)]


def without(*dropped):
    return lambda events: [event for event in events if event not in dropped]


def swapped(one, other):
    return lambda events: [other if e == one else one if e == other else e for e in events]


def added(event, after):
    def change(events):
        place = max(index for index, known in enumerate(events) if known == after)
        return [*events[: place + 1], event, *events[place + 1 :]]

    return change


def test_a_trace_that_keeps_its_promises_breaks_no_rule():
    assert event_rules.review(ALL, case(), ranks()) is None


BROKEN = {
    "held": (
        added(unit("a", "gather", 1), unit("a", "free", 1)),
        event_rules.all_freed,
        "stay gathered on rank 0: a",
    ),
    "twice": (added(unit("b", "gather", 1), unit("b", "gather", 1)), event_rules.gathered_once, "gathered again"),
    "freed early": (
        lambda events: [
            e
            for place, e in enumerate(events)
            if not (e == unit("a", "gather", 1) and module("a", "pre_forward", 1) in events[place:])
        ],
        event_rules.held_while_used,
        "a runs forward while its unit a is freed",
    ),
    "freed before backward": (
        lambda events: [e for p, e in enumerate(events) if e != unit("a", "gather", 1) or p < len(events) // 2 + 6],
        event_rules.held_while_used,
        "a runs backward while its unit a is freed",
    ),
    "bytes": (
        added(wire("all_gather_single", 1, 160), unit("a", "free", 1)),
        event_rules.gathers_needed,
        "bytes are gathered",
    ),
    "three gathers": (
        added(unit("a", "gather", 1), unit("a", "free", 1)),
        event_rules.gathers_needed,
        "unit a is gathered 3 times on rank 0, 2 would be enough",
    ),
    "reduced twice": (
        added(wire("reduce_scatter_single", 1), unit("a", "free", 1)),
        event_rules.reductions_needed,
        "3 reductions are issued on rank 0, 2 would be enough",
    ),
    "order": (swapped(unit("a", "gather", 1), unit("b", "gather", 1)), event_rules.in_order, "in the order b, a"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_each_broken_promise_is_found_by_its_rule(broken):
    change, rule, expected = BROKEN[broken]
    found = rule(case(), ranks(change))
    assert found is not None
    assert expected in found.statement
    assert found.operation == 1


def test_a_flag_is_no_reduction():
    flag = added(wire("all_reduce", 1, 1, "uint8"), unit("a", "free", 1))
    assert event_rules.reductions_needed(case(), ranks(flag)) is None


@pytest.mark.parametrize(("group", "problem"), [((0, 1), ""), ((0, 2), "3 reductions are issued on rank 0")])
def test_what_the_ranks_of_one_model_send_each_other_is_no_reduction_of_gradients(group, problem):
    def over_data(events):
        return [replace(event, group=(0, 2)) if isinstance(event, CollectiveEvent) else event for event in events]

    one_more = added(replace(wire("all_reduce", 1), group=group), unit("a", "free", 1))
    traced = ranks(over_data, one_more)[:1]
    finding = event_rules.reductions_needed(replace(case(), world=WorldSpec(4, tensor_parallel=2)), traced)
    assert problem in str(finding) if problem else finding is None


def test_ranks_that_disagree_are_told():
    one, other = ranks()
    shorter = replace(other, events=other.events[:-1])
    found = event_rules.review((event_rules.same_collectives,), case(), [one, shorter])
    assert found is not None
    assert "ranks disagree" in found.explanation


def test_more_held_than_promised_is_told_unless_promised_by_the_strategy():
    three = (*UNITS, ("c", ("c.weight",)))
    events = tuple(unit(name, "gather", 0) for name in ("a", "b", "c"))
    seen = [TracedObservation(0, events=events, units=three, shapes={**SHAPES, "c.weight": (4, 4)})]
    found = event_rules.within_memory(case(), seen)
    assert found is not None
    assert "48 elements are held in full (a, b, c), the strategy promises 32" in found.statement
    assert event_rules.within_memory(case("shard_grad_op"), seen) is None


def test_units_around_a_unit_count_as_its_own():
    nested = (("", ("w",)), ("a", ("a.weight",)), ("a.b", ("a.b.weight",)))
    shapes = {"w": (4, 4), "a.weight": (4, 4), "a.b.weight": (4, 4)}
    events = tuple(unit(name, "gather", 0) for name in ("", "a", "a.b"))
    assert event_rules.within_memory(case(), [TracedObservation(0, events=events, units=nested, shapes=shapes)]) is None


@pytest.mark.parametrize("rule", [event_rules.held_while_used, event_rules.in_order])
def test_modules_that_nobody_recognises_are_no_verdict(rule):
    seen = ranks(lambda events: [e for e in events if not isinstance(e, AutogradEvent)])
    with pytest.raises(HarnessError, match="only modules with other names"):
        rule(case(), seen)


def test_nothing_is_said_of_ranks_that_were_not_traced():
    assert event_rules.review(ALL, case(), [RankObservation(0), RankObservation(1)]) is None
