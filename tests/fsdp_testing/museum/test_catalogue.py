"""Every bug of the field that is known here is an exhibit, or has a reason why it is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdp_testing import museum
from fsdp_testing.museum.collection import exhibits

FOUND_HERE = "F"


@pytest.fixture(scope="module")
def catalogue() -> dict[str, Any]:
    file = Path(museum.__path__[0]) / "catalogue.json"
    document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    assert (document["format"], document["version"]) == ("fsdp_testing/museum_catalogue", 1)
    return document


def test_the_exhibits_of_the_catalogue_are_those_of_the_halls(catalogue: dict[str, Any]):
    shown = [name for name in exhibits() if not name.startswith(FOUND_HERE)]
    assert catalogue["exhibits"] == shown


def test_what_is_absent_has_a_reason_and_is_not_shown(catalogue: dict[str, Any]):
    absent: dict[str, str] = catalogue["absent"]
    assert not set(absent) & set(exhibits())
    assert all(len(reason.split()) >= 4 for reason in absent.values())
    assert list(absent) == sorted(absent)


def test_the_same_defect_as_another_names_one_that_is_listed(catalogue: dict[str, Any]):
    known = {*catalogue["exhibits"], *catalogue["absent"]}
    named = {
        word.strip(",.") for reason in catalogue["absent"].values() for word in reason.split() if word[1:4].isdigit()
    }
    assert named
    assert named <= known
