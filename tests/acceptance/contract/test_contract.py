"""The same situation gets the same word and the same exit code at every door; where it cannot be met, the table says why."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from table import DOORS, SITUATIONS, Door, Given, Situation, due, shown

CELLS = [(door, situation) for door in DOORS for situation in SITUATIONS if situation.name in door.cells]
LOSE_RANKS = ("a rank died early", "died after its last report", "hung once, passes alone", "hung always")
SETTLED_ALIKE = ("fuzz", "certify", "checkpoints", "replay", "check_model")
"""Doors whose lost ranks `judging/attempts.py: settle` decides of, as those of `run`. Each push asks `run`, settle itself
(tests/fsdp_testing/judging/test_attempts.py and test_batches.py), and of these doors the cheapest way to lose a rank: that they
say what was decided. The other ways wait for time limits or for a second run, and are nightly."""


def _tier(door: Door, situation: Situation) -> Any:
    nightly = door.name in SETTLED_ALIKE and situation.name in LOSE_RANKS[1:]
    marks = [pytest.mark.slow] if nightly else []
    return pytest.param(door, situation, id=f"{door.name}-{situation.name}", marks=marks)


@pytest.mark.parametrize(("door", "situation"), [_tier(*cell) for cell in CELLS])
def test_a_door_says_what_the_contract_says(
    door: Door, situation: Situation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert door.cells[situation.name](Given(tmp_path, monkeypatch)) == due(door, situation)


@pytest.mark.parametrize("door", DOORS, ids=[door.name for door in DOORS])
def test_every_situation_is_met_at_every_door_or_has_a_reason(door: Door):
    names = {situation.name for situation in SITUATIONS}
    assert set(door.cells) | set(door.without) == names
    assert not set(door.cells) & set(door.without)
    assert set(door.otherwise) <= set(door.cells)


@pytest.mark.parametrize("door", DOORS, ids=[door.name for door in DOORS])
def test_each_push_asks_every_word_of_every_door_and_loses_a_rank_there(door: Door):
    asked = [one for one in SITUATIONS if one.name in door.cells and not _tier(door, one).marks]
    every = [one for one in SITUATIONS if one.name in door.cells]
    assert {due(door, one) for one in asked} == {due(door, one) for one in every}
    losing = {one.name for one in every} & set(LOSE_RANKS)
    assert not losing or losing & {one.name for one in asked}


def test_the_table_shows_what_is_not_as_expected():
    table = {(one.name, door.name): due(door, one) for door, one in CELLS}
    assert "EXPECTED" not in shown(table)
    door, one = CELLS[0]
    assert "nothing (EXPECTED pass 0)" in shown({**table, (one.name, door.name): type(due(door, one))("nothing", None)})
