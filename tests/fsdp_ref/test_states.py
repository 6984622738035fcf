"""The life cycle of units: complete, enforced, and named in torch's words."""

from __future__ import annotations

import pytest

from fsdp_ref.errors import TransitionError
from fsdp_ref.states import READABLE, TRANSITIONS, LifeCycle, TrainingState, UnitState, training_state_of

S = UnitState


def test_every_state_has_a_row_and_can_be_reached_and_left():
    assert set(TRANSITIONS) == set(S)
    reached, frontier = {S.SHARDED}, [S.SHARDED]
    while frontier:
        for after in TRANSITIONS[frontier.pop()] - reached:
            reached.add(after)
            frontier.append(after)
    assert reached == set(S), "a state that cannot be reached"
    assert all(TRANSITIONS[state] - {state} for state in S), "a state that cannot be left"


@pytest.mark.parametrize("old", S)
@pytest.mark.parametrize("new", S)
def test_moves_outside_the_table_are_refused_by_name(old, new):
    life = LifeCycle()
    life.state = old
    if new in TRANSITIONS[old]:
        life.move(new, "a")
        assert life.state is new
    else:
        with pytest.raises(TransitionError, match=rf"unit 'a': expected a move from {old.name} .* got {new.name}"):
            life.move(new, "a")
        assert life.state is old


def test_what_must_never_happen():
    assert not TRANSITIONS[S.SHARDED] & READABLE, "reading what nobody gathered"
    assert not TRANSITIONS[S.GATHERING] & {S.FORWARD, S.BACKWARD}, "reading before the gather has ended"
    assert S.FORWARD not in TRANSITIONS[S.SUMMONED], "computing with what a user edits"
    assert S.SUMMONED not in TRANSITIONS[S.FORWARD] | TRANSITIONS[S.BACKWARD], "editing what computes"


def test_torch_knows_three_of_them():
    assert [state.name for state in TrainingState] == ["IDLE", "FORWARD_BACKWARD", "SUMMON_FULL_PARAMS"]
    busy = {state: training_state_of(state) for state in S if training_state_of(state) is not TrainingState.IDLE}
    assert busy == {
        S.FORWARD: TrainingState.FORWARD_BACKWARD,
        S.BACKWARD: TrainingState.FORWARD_BACKWARD,
        S.SUMMONED: TrainingState.SUMMON_FULL_PARAMS,
    }
