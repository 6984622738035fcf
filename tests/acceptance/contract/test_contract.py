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
"""Doors whose lost ranks `judging/attempts.py: settle` decides of, as those of `run`. Each push asks `run`, and settle itself
(tests/fsdp_testing/judging/test_attempts.py and test_batches.py). That these doors say what was decided, their other
situations ask, among them one that fails and one that is unknown. Their cells that lose ranks wait for it, and are nightly."""


def _tier(door: Door, situation: Situation) -> Any:
    nightly = door.name in SETTLED_ALIKE and situation.name in LOSE_RANKS
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
def test_each_push_asks_every_word_of_every_door(door: Door):
    asked = [one for one in SITUATIONS if one.name in door.cells and not _tier(door, one).marks]
    every = [one for one in SITUATIONS if one.name in door.cells]
    assert {due(door, one) for one in asked} == {due(door, one) for one in every}


def test_the_table_shows_what_is_not_as_expected():
    table = {(one.name, door.name): due(door, one) for door, one in CELLS}
    assert "EXPECTED" not in shown(table)
    door, one = CELLS[0]
    assert "nothing (EXPECTED pass 0)" in shown({**table, (one.name, door.name): type(due(door, one))("nothing", None)})
