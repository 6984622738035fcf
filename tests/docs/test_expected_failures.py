"""What `tox -e verify` expects to fail has a page or script in docs/findings, and names what exists."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from fsdp_testing.implementations import registry
from fsdp_testing.suites import CHECKS

FINDINGS = Path(__file__).resolve().parents[2] / "docs/findings"
EXPECTED = tomllib.loads((FINDINGS / "expected-failures.toml").read_text(encoding="utf-8"))


def test_names_exist() -> None:
    assert set(EXPECTED) <= set(registry.names())
    for table in EXPECTED.values():
        assert set(table) <= set(CHECKS)


def test_only_torch_is_expected_to_fail() -> None:
    assert {name.partition("-")[0] for name in EXPECTED} == {"torch"}


def test_every_reason_leads_to_its_page() -> None:
    for name, table in EXPECTED.items():
        for check, reason in table.items():
            pages = re.findall(r"[\w/-]+\.(?:md|py)", reason)
            assert pages, f"{name} {check}: neither page nor script"
            for page in pages:
                assert (FINDINGS / page).exists(), f"{name} {check}: {page} is missing"
            for thread in re.findall(r"https://[^\s,]+", reason):
                assert any(thread in (FINDINGS / page).read_text(encoding="utf-8") for page in pages), thread
