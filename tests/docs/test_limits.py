"""docs/findings/limits.md has a row for all that a built-in adapter does not claim, and a column for each of them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fsdp_testing.adapters import registry
from fsdp_testing.cases.records import CAPABILITIES
from fsdp_testing.checks.suites.beyond_claims import Limit, Probed

ROOT = Path(__file__).resolve().parents[2]


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("limits", ROOT / "ci" / "limits.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LIMITS = script()
PAGE = (ROOT / "docs" / "findings" / "limits.md").read_text(encoding="utf-8")


def test_the_page_has_every_column_and_both_paths_of_the_reference():
    assert {"fsdp_ref-wrapper", "fsdp_ref-composable"} <= set(LIMITS.COLUMNS)
    assert f"| capability | {' | '.join(LIMITS.COLUMNS)} |" in PAGE


@pytest.mark.skipif(
    torch.__version__.partition("+")[0] != LIMITS.pinned_torch(),
    reason="what adapters claim depends on torch's release",
)
def test_the_page_is_what_the_probes_have_found():
    assert LIMITS.page(LIMITS.read()) == PAGE, "run `python ci/limits.py --page`"


def test_what_is_claimed_was_not_probed():
    for tag, row in LIMITS.read().items():
        assert tag in CAPABILITIES
        for name in row:
            assert tag not in registry.load(name).capabilities, f"run `python ci/limits.py {name} {tag}`"


def test_a_cell_says_what_was_found():
    found = Probed("hybrid", Limit.SILENT, "hybrid.trained", "off by 3 | `x`")
    page = LIMITS.page({"hybrid": {"torch-ddp": found}})
    assert "(`hybrid`) | **silent outside its claims** | claimed |" in page
    assert "- `hybrid` on torch-ddp: `hybrid.trained`: off by 3 \\| 'x'" in page
