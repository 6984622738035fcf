"""The same situation gets the same word and the same exit code at every door; where it cannot be met, the table says why."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from table import DOORS, SITUATIONS, Door, Given, Situation, due, shown

CELLS = [(door, situation) for door in DOORS for situation in SITUATIONS if situation.name in door.cells]


@pytest.mark.parametrize(("door", "situation"), CELLS, ids=[f"{door.name}-{one.name}" for door, one in CELLS])
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


def test_the_table_shows_what_is_not_as_expected():
    table = {(one.name, door.name): due(door, one) for door, one in CELLS}
    assert "EXPECTED" not in shown(table)
    door, one = CELLS[0]
    assert "nothing (EXPECTED pass 0)" in shown({**table, (one.name, door.name): type(due(door, one))("nothing", None)})
