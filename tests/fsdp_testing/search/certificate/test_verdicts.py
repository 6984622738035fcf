"""What a certificate keeps: whole, only of what it was made for, and what was unknown is asked again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdp_testing.errors import InvalidRecord
from fsdp_testing.search.certificate.axes import Cell
from fsdp_testing.search.certificate.cube import jobs
from fsdp_testing.search.certificate.verdicts import FAILS, HELD, HOLDS, UNKNOWN, Mark, Verdicts

JOBS = jobs(lambda cell: cell.strategy == "full_shard", sample=200)
FAILED = Mark(FAILS, "gradient of a.w is off", ("diverged", "gradient", "end"))


def verdicts(folder: Path, subject: str = "toy", source: str = "digest") -> Verdicts:
    return Verdicts(JOBS, subject, source, folder)


def held(number: int, **others: Mark) -> list[tuple[Cell, Mark]]:
    return [(cell, others.get(f"at_{place}", HELD)) for place, cell in enumerate(JOBS[number])]


def test_what_is_kept_comes_back(tmp_path: Path):
    made = verdicts(tmp_path)
    bad, unknown = JOBS[1][2], JOBS[0][3]
    made.take(0, held(0, at_3=Mark(UNKNOWN, "the judge was lost")))
    made.take(1, held(1, at_2=FAILED))
    made.seconds = 12.5
    made.save()
    assert made.counts() == {HOLDS: len(JOBS[0]) + len(JOBS[1]) - 2, FAILS: 1, UNKNOWN: 1}
    assert made.status(unknown) == UNKNOWN
    again = verdicts(tmp_path)
    # What was unknown is asked again.
    assert again.marks == {cell: made.marks[cell] for cell in JOBS[1]}
    assert again.seconds == 12.5
    assert list(again.remaining()) == [0, *range(2, len(JOBS))]
    assert again.counts() == {HOLDS: len(JOBS[1]) - 1, FAILS: 1}
    assert again.failing() == [bad]
    signature = again.marks[bad].signature
    assert signature is not None
    assert str(signature) == "diverged gradient in end"


def test_a_cell_of_which_nothing_is_said_is_unknown(tmp_path: Path):
    made = verdicts(tmp_path)
    made.take(0, held(0)[1:])
    assert made.status(JOBS[0][0]) == UNKNOWN
    assert made.counts() == {HOLDS: len(JOBS[0]) - 1, UNKNOWN: 1}
    with pytest.raises(KeyError):
        made.status(JOBS[1][0])  # it did not run


def test_what_is_complete_is_made_anew_whatever_has_changed(tmp_path: Path):
    made = verdicts(tmp_path)
    for number in range(len(JOBS)):
        made.take(number, held(number, at_0=FAILED))
    made.save()
    for source in ("digest", "another"):
        again = verdicts(tmp_path, source=source)
        assert (again.earlier, set(again.ran)) == (0, set())
        assert len(list(again.remaining())) == len(JOBS)
    made.take(0, held(0, at_0=Mark(UNKNOWN, "lost")))
    made.save()
    assert list(verdicts(tmp_path).remaining()) == [0]


def test_a_state_of_something_else_is_refused(tmp_path: Path):
    verdicts(tmp_path).save()
    with pytest.raises(InvalidRecord, match="certificate.json.subject: expected 'other"):
        verdicts(tmp_path, "other")
    with pytest.raises(InvalidRecord, match="Give another --state"):
        Verdicts(JOBS[1:], "toy", "digest", tmp_path)


def test_a_state_from_before_a_change_is_refused(tmp_path: Path):
    made = verdicts(tmp_path)
    made.take(0, held(0))
    made.save()
    with pytest.raises(InvalidRecord, match="the implementation, or fsdp-testing, has changed since this certificate"):
        verdicts(tmp_path, source="another")


def without_marks(data: dict[str, Any]) -> dict[str, Any]:
    return {**data, "marks": {}}


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data | {"version": 99},
        lambda data: data | {"version": 1, "done": [0], "source": None},
        lambda data: {name: data[name] for name in data if name != "source"} | {"version": 1, "done": [0]},
        lambda data: data | {"verdicts": {str(10**6): "h"}},
        lambda data: data | {"verdicts": {"-1": "h"}},
        lambda data: data | {"verdicts": {"0": data["verdicts"]["0"][1:]}},
        lambda data: data | {"verdicts": {"0": "?" * len(data["verdicts"]["0"])}},
        lambda data: data | {"marks": {"full_shard/2": {"status": "fails", "reason": ""}}},
        without_marks,
        lambda data: {name: data[name] for name in data if name != "marks"},
        lambda data: data | {"marks": {name: mark | {"status": "unknown"} for name, mark in data["marks"].items()}},
        lambda data: data | {"verdicts": "all"},
    ],
)
def test_a_damaged_state_is_refused(damage, tmp_path: Path):
    made = verdicts(tmp_path)
    made.take(0, held(0, at_2=FAILED))
    made.save()
    verdicts(tmp_path)
    file = tmp_path / "certificate.json"
    file.write_text(json.dumps(damage(json.loads(file.read_text()))))
    with pytest.raises(InvalidRecord, match=r"certificate\.json"):
        verdicts(tmp_path)
