"""A certificate that was written is read again, and one whose counts are damaged is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fsdp_testing.errors import InvalidRecord
from fsdp_testing.search.certificate.summary import Summary, read_summary

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
