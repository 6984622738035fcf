"""No file, function, parameter list or class grows past the limits of the house style without a written reason."""

from __future__ import annotations

import pytest
from tree_rules import PACKAGES, ROOT, budget_offences, python_files, settings

LIMITS = settings()["budgets"]
TREE = python_files(*PACKAGES, "ci", "tests", "benchmarks", "examples")


def test_the_tree_keeps_its_budgets() -> None:
    allowed = {(entry["rule"], entry["file"], entry.get("name", "")) for entry in settings().get("allow", [])}
    offences = [
        offence
        for path in TREE
        for offence in budget_offences(str(path), (ROOT / path).read_text(encoding="utf-8"), LIMITS)
        if not str(path).startswith("tests/") or offence.rule in {"file_lines", "function_lines"}
    ]
    left = [offence for offence in offences if (offence.rule, offence.path, offence.name) not in allowed]
    assert not left, "\n".join(map(str, left))
    stale = allowed - {(offence.rule, offence.path, offence.name) for offence in offences}
    assert not stale, f"ci/architecture.toml allows what no longer needs it: {sorted(stale)}"


def test_every_exception_has_a_reason() -> None:
    for entry in settings().get("allow", []):
        assert len(entry["reason"]) > 20, entry


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        ("file_lines", "x = 1\n" * 401),
        ("function_lines", "def long():\n" + "    x = 1\n" * 50),
        ("parameters", "def wide(a, b, c, /, d, *, e, f, g): ..."),
        ("public_methods", "class Big:\n" + "".join(f"    def m{i}(self): ...\n" for i in range(16))),
    ],
)
def test_each_budget_can_be_exceeded(rule: str, source: str) -> None:
    assert [offence.rule for offence in budget_offences("fsdp_ref/x.py", source, LIMITS)] == [rule]


def test_test_files_have_a_limit_of_their_own() -> None:
    assert not list(budget_offences("tests/x.py", "x = 1\n" * 650, LIMITS))
    assert list(budget_offences("tests/x.py", "x = 1\n" * 651, LIMITS))


@pytest.mark.parametrize(
    "source",
    [
        "x = 1\n" * 400,
        'def told():\n    """' + "words\n" * 60 + '"""\n    return 1\n',
        "class Fine:\n    def method(self, a, b, c, d, e, f): ...",
    ],
)
def test_what_stays_within_budget_is_left_alone(source: str) -> None:
    assert not list(budget_offences("fsdp_ref/x.py", source, LIMITS))
