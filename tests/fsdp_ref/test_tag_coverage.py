"""Every known behaviour, and every known bug, is tested by a test that names it.

``behaviour_tags.json`` lists them with one line of meaning each; a test cites those it is evidence for with
``@pytest.mark.covers("ORIG-09", "B025")``. ``tags_left_out.json`` gives a reason for each that has no test. Known bugs
of the field are counted apart: ``bug_ids.json`` lists the ids of all, ``bugs_left_out.json`` the reasons. The citations
are read from the sources, so that a test which is skipped or deselected here still counts.
"""

from __future__ import annotations

import ast
import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

HERE = Path(__file__).parent
TESTS = HERE.parent


def known() -> dict[str, str]:
    sections = json.loads((HERE / "behaviour_tags.json").read_text())
    tags = [tag for section in sections.values() for tag in section]
    assert len(tags) == len(set(tags)), "a tag in two sections"
    return {tag: meaning for section in sections.values() for tag, meaning in section.items()}


def left_out() -> dict[str, str]:
    return json.loads((HERE / "tags_left_out.json").read_text())


def bugs() -> list[str]:
    ids = json.loads((HERE / "bug_ids.json").read_text())
    assert ids == sorted(set(ids)), "an id twice, or out of order"
    return ids


def bugs_left_out() -> dict[str, str]:
    return json.loads((HERE / "bugs_left_out.json").read_text())


def is_bug(tag: str) -> bool:
    return tag[:1] == "B" and tag[1:].isdigit()


def citations(source: str) -> list[tuple[str, str]]:
    """(test, tag) for each covers marker on a test function or class."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            continue
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.covers":
                found.extend((node.name, ast.literal_eval(argument)) for argument in decorator.args)
    return found


@functools.cache
def cited() -> dict[str, list[str]]:
    tags: dict[str, list[str]] = {}
    for path in sorted((TESTS / "fsdp_ref").rglob("test_*.py")):
        for test, tag in citations(path.read_text()):
            tags.setdefault(tag, []).append(f"{path.relative_to(TESTS)}::{test}")
    return tags


def test_every_behaviour_is_tested_or_left_out_for_a_reason():
    missing = {tag: meaning for tag, meaning in known().items() if tag not in cited() and tag not in left_out()}
    assert not missing, "\n".join(f"{tag}: {meaning}" for tag, meaning in missing.items())


def test_every_reason_is_still_needed():
    tags = cited()
    stale = [tag for tag in left_out() if tag in tags or tag not in known()]
    assert not stale, f"tested after all, or unknown: {stale}"
    short = [tag for tag, reason in left_out().items() if len(reason.split()) < 4]
    assert not short, f"no reason given: {short}"


def unaccounted(ids: list[str], named: set[str], reasons: dict[str, str]) -> dict[str, list[str]]:
    """What is wrong with the account of known bugs, by kind; empty lists are left out."""
    found = {
        "neither named by a test nor left out for a reason": [i for i in ids if i not in named and i not in reasons],
        "left out, and yet named by a test": [i for i in reasons if i in named],
        "left out without being known": [i for i in reasons if i not in ids],
        "left out without saying why": [i for i, reason in reasons.items() if len(reason.split()) < 6],
        "named by a test without being known": sorted(named - set(ids)),
    }
    return {what: offenders for what, offenders in found.items() if offenders}


def test_every_known_bug_is_tested_or_left_out_for_a_reason():
    named = {tag for tag in cited() if is_bug(tag)}
    assert unaccounted(bugs(), named, bugs_left_out()) == {}
    assert len(bugs()) == 128
    # Each that is tested has a line of meaning, and nothing else has.
    assert {tag for tag in known() if is_bug(tag)} == named


def test_the_account_of_known_bugs_can_fail():
    reason = "needs a device that this machine has not"
    wrong = unaccounted(
        ["B001", "B002", "B003", "B004"], {"B001", "B003", "B900"}, {"B003": reason, "B004": "no", "B901": reason}
    )
    assert wrong == {
        "neither named by a test nor left out for a reason": ["B002"],
        "left out, and yet named by a test": ["B003"],
        "left out without being known": ["B901"],
        "left out without saying why": ["B004"],
        "named by a test without being known": ["B900"],
    }


def test_every_citation_is_of_a_known_tag_and_on_a_test():
    names = known()
    wrong = {tag: tests for tag, tests in cited().items() if tag not in names}
    assert not wrong, wrong
    helpers = [test for tests in cited().values() for test in tests if not test.rpartition("::")[2].startswith("test")]
    assert not helpers, f"cited by something that is no test: {helpers}"


def test_markers_are_read_from_functions_and_classes():
    source = """
@pytest.mark.covers("A-1", "A-2")
def test_x(): pass

@pytest.mark.world(2)
@pytest.mark.covers("A-3")
class TestY: pass

def test_z(): "A-4"
"""
    assert citations(source) == [("test_x", "A-1"), ("test_x", "A-2"), ("TestY", "A-3")]


def test_the_marker_is_registered(pytestconfig: pytest.Config):
    assert any(line.startswith("covers(") for line in pytestconfig.getini("markers"))
