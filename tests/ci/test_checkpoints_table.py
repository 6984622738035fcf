"""The table of checkpoints (ci/checkpoints_table.py): what has a page is explained, what has none is listed."""

from __future__ import annotations

import checkpoints_table
from checkpoints_table import DOCS, PAGES, document

from fsdp_testing.cases.records import Verdict
from fsdp_testing.search.checkpoints.exchange import Result
from fsdp_testing.search.checkpoints.summary import Summary

DDP, OURS = "torch-ddp no_shard/2/root", "fsdp_ref-wrapper full_shard/2/root"
KNOWN = "loading: AssertionError: Expected device to be set"


def summary(*results: Result) -> Summary:
    return Summary({"torch": "9.9"}, (DDP, OURS), results, 1.0)


def test_a_failure_has_a_page_or_is_listed():
    held = Result(OURS, DDP, "no state", "file", Verdict.PASS)
    known = Result(DDP, DDP, "no state", "file", Verdict.FAIL, KNOWN, loud=True)
    new = Result(DDP, DDP, "no state", "dcp", Verdict.FAIL, "loading: lr of w: got 1, expected 2")
    ours = Result(DDP, OURS, "no state", "file", Verdict.FAIL, KNOWN, loud=True)
    # As it is written and read again.
    text, unexplained = document(
        [Summary.from_json(one.to_json(), "here") for one in (summary(held, known), summary(new, ours))]
    )
    assert unexplained == [new, ours]
    rows = [line.split() for line in text.splitlines() if line.startswith((" 1 ", " 2 "))]
    assert rows == [["1", *DDP.split(), ".", "X", "r"], ["2", *OURS.split(), ".", "=", "."]]
    assert "- 1 states, torch-ddp: [dsd-stateless-optimizer](findings/dsd-stateless-optimizer.md)" in text
    assert "- `X` torch-ddp no_shard/2/root -> torch-ddp no_shard/2/root (no state; dcp): loading: lr of w" in text
    assert "1 of 4 loaded states are equal" in text


def test_every_page_that_explains_is_there():
    assert all((DOCS / "findings" / f"{page}.md").is_file() for page in PAGES.values())
    committed = checkpoints_table.PAGE.read_text(encoding="utf-8")
    assert "Without an explanation" not in committed
