"""A certificate that was written is read again, and one whose counts are damaged is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from fsdp_testing.errors import InvalidArgument, InvalidRecord
from fsdp_testing.search.certificate.summary import Summary, read_summary
from fsdp_testing.search.merging import merge_certificates

COUNTS = {"pass": 2, "fail": 1, "unknown": 0}
SUMMARY = Summary(
    *("torch-ddp", {"torch": "2"}, "digest", 12, {}, 3, 0, COUNTS),
    faces={"full_shard 2": {"all": COUNTS}},
    reasons={},
    causes=(),
    unconfirmed=0,
    unexplained=1,
    failing=(),
    seconds=1.0,
)


def test_what_was_written_is_read() -> None:
    assert read_summary(SUMMARY.to_json(), "a.json") == SUMMARY


@pytest.mark.parametrize(
    "damage",
    [
        {"verdicts": {"pass": 2, "fail": 1}},
        {"verdicts": {**COUNTS, "\x1b[2J": 1}},
        {"faces": {"full_shard 2": {"all": {"holds": 3}}}},
        {"faces": {"full_shard 2": {"all": {**COUNTS, "pass": -1}}}},
    ],
)
def test_counts_of_other_verdicts_are_refused(damage: dict[str, Any]) -> None:
    document = json.dumps(json.loads(SUMMARY.to_json()) | damage)
    with pytest.raises(InvalidRecord, match=r"a\.json: expected counts of pass, fail, unknown, got"):
        read_summary(document, "a.json")


@pytest.mark.parametrize("damage", [{"asked": 2}, {"asked": 13}, {"asked": -1}])
def test_more_cells_than_were_asked_are_refused(damage: dict[str, Any]) -> None:
    document = json.dumps(json.loads(SUMMARY.to_json()) | damage)
    with pytest.raises(
        InvalidRecord, match=r"a\.json: expected no more cells that ran than were asked of 12, got 3 of"
    ):
        read_summary(document, "a.json")


def test_parts_of_a_sample_ask_all_of_it() -> None:
    parts = {
        f"{i}.json": replace(SUMMARY, sample=20, not_claimed={"hybrid": 4}, cube=12, asked=4, shard=(i, 2))
        for i in (1, 2)
    }
    assert merge_certificates(parts).asked == 8  # all that are claimed
    lacking = {name: replace(part, asked=3 if part.shard == (2, 2) else 4) for name, part in parts.items()}
    with pytest.raises(InvalidArgument, match="expected parts that ask 8 cells together, got 7 cells"):
        merge_certificates(lacking)
