"""Transition tables: complete, named as torch names the states, and enforced."""

from __future__ import annotations

import pytest

from fsdp_ref import states
from fsdp_ref.errors import TransitionError

TABLES = [
    (states.TrainingState, states.TRAINING_TRANSITIONS),
    (states.HandleTrainingState, states.HANDLE_TRANSITIONS),
    (states.ShardState, states.SHARD_TRANSITIONS),
]


def test_members_are_those_of_torch():
    assert [s.name for s in states.TrainingState] == ["IDLE", "FORWARD_BACKWARD", "SUMMON_FULL_PARAMS"]
    handle = ["IDLE", "FORWARD", "BACKWARD_PRE", "BACKWARD_POST", "SUMMON_FULL_PARAMS"]
    assert [s.name for s in states.HandleTrainingState] == handle


@pytest.mark.parametrize(("enum", "table"), TABLES, ids=lambda x: getattr(x, "__name__", ""))
def test_every_state_has_a_row_and_can_be_left(enum, table):
    assert set(table) == set(enum)
    start = next(iter(enum))
    reached, frontier = {start}, [start]
    while frontier:
        for after in table[frontier.pop()] - reached:
            reached.add(after)
            frontier.append(after)
    assert reached == set(enum), "a state that cannot be reached"
    assert all(table[state] - {state} for state in enum), "a state that cannot be left"


@pytest.mark.parametrize(("enum", "table"), TABLES, ids=lambda x: getattr(x, "__name__", ""))
def test_moves_outside_the_table_are_refused_by_name(enum, table):
    for old in enum:
        for new in enum:
            if new in table[old]:
                assert states.check_transition(table, old, new, where="unit a") is new
            else:
                with pytest.raises(
                    TransitionError, match=rf"unit a: expected a move from {old.name} .* got {new.name}"
                ):
                    states.check_transition(table, old, new, where="unit a")


def test_what_must_never_happen():
    shard = states.ShardState
    assert shard.UNSHARDED not in states.SHARD_TRANSITIONS[shard.SHARDED], "reading before the gather has ended"
    summon = states.TrainingState.SUMMON_FULL_PARAMS
    assert summon not in states.TRAINING_TRANSITIONS[summon]
    assert summon not in states.TRAINING_TRANSITIONS[states.TrainingState.FORWARD_BACKWARD]
