"""What `tox -e verify` expects to fail has a page or script in docs/findings, names what exists, and says how it fails."""

from __future__ import annotations

import tomllib
from pathlib import Path

from fsdp_testing.adapters import registry
from fsdp_testing.cases.records import ExpectedFailure
from fsdp_testing.checks.suites import CHECKS
from fsdp_testing.cli.run import tables
from fsdp_testing.judging.expected import expectations

FINDINGS = Path(__file__).resolve().parents[2] / "docs/findings"
TABLES = tables(tomllib.loads((FINDINGS / "expected-failures.toml").read_text(encoding="utf-8")))
EXPECTED = [
    (name, check, expectation)
    for table in TABLES
    for name, checks in expectations(table, registry.names(), CHECKS).items()
    for check, expectation in checks.items()
]
ENTRIES: list[tuple[str, str, ExpectedFailure]] = [
    (name, check, entry) for name, check, expectation in EXPECTED for entry in expectation.failures
]


def test_names_exist() -> None:
    assert all(TABLES)
    assert {name for table in TABLES for name in table} <= set(registry.names())
    assert EXPECTED


def test_only_torch_is_expected_to_fail() -> None:
    assert {name.partition("-")[0] for name, _, _ in EXPECTED} == {"torch"}


def test_every_entry_says_how_it_fails() -> None:
    assert [(name, check) for name, check, expectation in EXPECTED if expectation.bare] == []


def test_every_reason_leads_to_its_page() -> None:
    for name, check, entry in ENTRIES:
        assert (FINDINGS / entry.page).is_file(), f"{name} {check}: neither page nor script, or {entry.page} is missing"
        text = (FINDINGS / entry.page).read_text(encoding="utf-8")
        assert not entry.issue or entry.issue in text, f"{name} {check}: {entry.page} does not name {entry.issue}"
