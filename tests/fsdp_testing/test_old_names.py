"""Modules that moved: users' imports of yesterday give the same objects, and a warning that names the new place."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

import fsdp_testing
from fsdp_testing.old_names import ROOMS, new_name

HERE = Path(fsdp_testing.__file__).parent


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """No old name was imported yet: a module warns when it is imported, not when it is used."""
    for name in [name for name in sys.modules if new_name(name)]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize(("old", "new"), ROOMS.items())
def test_every_old_name_leads_to_a_module_of_today(old: str, new: str) -> None:
    place = HERE / new.replace(".", "/")
    assert place.is_dir() or place.with_suffix(".py").is_file(), f"{old} leads to {new}, which is gone"
    assert not (HERE / old.replace(".", "/")).exists(), f"{old} is a module of today"


def test_an_old_import_gives_the_same_class_and_says_where_it_is_now() -> None:
    with pytest.warns(DeprecationWarning, match="fsdp_testing.implementations") as warned:
        old = importlib.import_module("fsdp_testing.implementations.adapter")
    assert "fsdp_testing.implementations.adapter is now fsdp_testing.adapters.adapter" in str(warned[-1].message)
    new = importlib.import_module("fsdp_testing.adapters.adapter")
    assert old.TorchStyle is new.TorchStyle
    assert new.__spec__ is not None and new.__spec__.name == "fsdp_testing.adapters.adapter"


def test_a_part_of_a_room_that_was_split_goes_to_its_own_place() -> None:
    assert new_name("fsdp_testing.checkers.comparison") == "fsdp_testing.oracle.quantities"
    assert new_name("fsdp_testing.checkers.agreement") == "fsdp_testing.judging.checkers.agreement"
    assert new_name("fsdp_testing.adapters") is None
    assert new_name("torch.records") is None


@pytest.mark.filterwarnings("ignore:fsdp_testing")
@pytest.mark.parametrize("name", ["fsdp_testing.implementations.nothing", "fsdp_testing.nothing"])
def test_what_never_was_is_still_missing(name: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=name.replace(".", r"\.")):
        importlib.import_module(name)
