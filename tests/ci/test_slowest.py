"""The page of the slowest tests (ci/slowest.py) says what a run of pytest says in its JUnit file."""

from __future__ import annotations

import slowest


def test_the_page_names_the_slowest_first_and_adds_up_all_phases(pytester):
    pytester.makepyfile("import pytest\n\n\n@pytest.mark.parametrize('i', range(60))\ndef test_one(i):\n    pass\n")
    pytester.runpytest_inprocess("--junit-xml=suite.xml", "-q")
    text = (pytester.path / "suite.xml").read_text(encoding="utf-8")
    name = 'name="test_one[7]" time="'
    before, after = text.split(name)
    said = slowest.page(before + name + "12.5" + after[after.index('"') :])
    rows = [line for line in said.splitlines() if line.startswith("| ") and "`" in line]
    assert len(rows) == slowest.SHOWN
    assert rows[0].startswith("| 12.5 | `") and rows[0].endswith(".py::test_one[7]` |")
    assert "slowest of 60 tests" in said
    assert "60 tests in 0 minutes on" in " ".join(said.split())


def test_a_bar_in_a_name_does_not_end_its_cell():
    assert slowest.table({"a[x|y]": 1.0})[-1] == "| 1.0 | `a[x/y]` |"
