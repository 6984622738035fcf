"""What `tox -e verify` expects to fail has a page or script in docs/findings, and names what exists."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from fsdp_testing.cli.run import tables
from fsdp_testing.implementations import registry
from fsdp_testing.suites import CHECKS

FINDINGS = Path(__file__).resolve().parents[2] / "docs/findings"
TABLES = tables(tomllib.loads((FINDINGS / "expected-failures.toml").read_text(encoding="utf-8")))
EXPECTED = [(name, expected) for table in TABLES for name, expected in table.items()]


def test_names_exist() -> None:
    assert all(TABLES)
    for name, expected in EXPECTED:
        assert name in registry.names()
        assert set(expected) <= set(CHECKS)


def test_only_torch_is_expected_to_fail() -> None:
    assert {name.partition("-")[0] for name, _ in EXPECTED} == {"torch"}


def test_every_reason_leads_to_its_page() -> None:
    for name, expected in EXPECTED:
        for check, reason in expected.items():
            pages = re.findall(r"[\w/-]+\.(?:md|py)", reason)
            assert pages, f"{name} {check}: neither page nor script"
            for page in pages:
                assert (FINDINGS / page).exists(), f"{name} {check}: {page} is missing"
            for thread in re.findall(r"https://[^\s,]+", reason):
                assert any(thread in (FINDINGS / page).read_text(encoding="utf-8") for page in pages), thread
