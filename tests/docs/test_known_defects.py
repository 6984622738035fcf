"""The table of known defects names scripts, implementations and checks that exist, and most defects are exposed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fsdp_testing.adapters import registry
from fsdp_testing.checks.suites import CHECKS

ROOT = Path(__file__).resolve().parents[2]
MOST_LINES = 40
LEAST_SHARE = 0.9


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("known_defects", ROOT / "ci" / "known_defects.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for the module of their class
    spec.loader.exec_module(module)
    return module


KNOWN = script()
DEFECTS = KNOWN.read()
NAMES = [one.id for one in DEFECTS]


def test_each_defect_has_one_script_and_each_script_its_defect():
    own = {path.stem for path in KNOWN.TABLE.parent.glob("*.py")} - {KNOWN.SHARED}
    assert len(set(NAMES)) == len(NAMES) >= 40
    assert own <= set(NAMES)
    assert all(one.script.exists() for one in DEFECTS)


def test_scripts_are_small_and_need_torch_alone():
    for path in KNOWN.TABLE.parent.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "fsdp_testing" not in text
        assert "fsdp_ref" not in text
        if path.stem != KNOWN.SHARED:
            assert len(text.splitlines()) <= MOST_LINES, path.name
            assert "show(defect" in text, path.name


@pytest.mark.parametrize("one", DEFECTS, ids=NAMES)
def test_each_defect_is_exposed_by_a_check_that_is_asked_or_nothing_is_said_to(one):
    assert bool(one.check) == bool(one.on) != bool(one.why)
    if one.check:
        assert CHECKS[one.check].needs <= registry.load(one.implementation).capabilities


def test_a_capability_that_is_claimed_is_not_called_a_limit():
    for one in DEFECTS:
        name, _, capability = one.on.partition("+")
        assert not capability or capability not in registry.load(name).capabilities, one.id


def test_most_are_exposed_and_the_page_says_so():
    share = sum(bool(one.check) for one in DEFECTS) / len(DEFECTS)
    assert share >= LEAST_SHARE
    assert KNOWN.page(DEFECTS) == KNOWN.PAGE.read_text(encoding="utf-8"), "run `python ci/known_defects.py`"


@pytest.mark.slow
@pytest.mark.parametrize("one", DEFECTS, ids=NAMES)
def test_each_defect_shows_and_is_exposed(one):
    assert list(KNOWN.wrong([one])) == []
