"""Every bug of the field that is known here is planted, or has a reason why it is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import every_fault
import pytest
from proving import BUGS

FOUND_HERE = "F"


@pytest.fixture(scope="module")
def catalogue() -> dict[str, Any]:
    file = Path(every_fault.__file__).parent / "catalogue.json"
    document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    assert (document["format"], document["version"]) == ("fsdp_testing/museum_catalogue", 1)
    return document


def test_the_bugs_of_the_catalogue_are_those_that_are_planted(catalogue: dict[str, Any]):
    shown = [name for name in BUGS if not name.startswith(FOUND_HERE)]
    assert catalogue["exhibits"] == shown


def test_what_is_absent_has_a_reason_and_is_not_shown(catalogue: dict[str, Any]):
    absent: dict[str, str] = catalogue["absent"]
    assert not set(absent) & set(BUGS)
    assert all(len(reason.split()) >= 4 for reason in absent.values())
    assert list(absent) == sorted(absent)


def test_the_same_defect_as_another_names_one_that_is_listed(catalogue: dict[str, Any]):
    known = {*catalogue["exhibits"], *catalogue["absent"]}
    named = {
        word.strip(",.") for reason in catalogue["absent"].values() for word in reason.split() if word[1:4].isdigit()
    }
    assert named
    assert named <= known


@pytest.mark.parametrize("name", BUGS.values())
def test_a_bug_tells_its_story_and_its_source(name: str):
    bug = every_fault.FAULTS[name]
    assert bug.title
    assert bug.story.endswith(".")
    assert bug.source
