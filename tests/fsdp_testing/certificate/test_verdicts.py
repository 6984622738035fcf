"""What a certificate keeps: whole, only of what it was made for, and what was unknown is asked again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdp_testing.certificate.causes import _are_alike
from fsdp_testing.certificate.cube import jobs
from fsdp_testing.certificate.verdicts import FAILS, HOLDS, REFUSED, UNKNOWN, Mark, Verdicts
from fsdp_testing.errors import InvalidRecord

JOBS = jobs(lambda cell: cell.strategy == "full_shard", sample=200)
FAILED = Mark(FAILS, "gradient of a.w is off", ("diverged", "gradient", "end"))


def verdicts(folder: Path, subject: str = "toy") -> Verdicts:
    return Verdicts(JOBS, subject, folder)


def test_what_is_kept_comes_back(tmp_path: Path):
    made = verdicts(tmp_path)
    bad, refused = JOBS[1][2], JOBS[1][3]
    made.take(0, [(cell, None) for cell in JOBS[0]])
    made.take(1, [(bad, FAILED), (refused, Mark(REFUSED, "not there"))])
    made.seconds = 12.5
    made.save()
    again = verdicts(tmp_path)
    assert (again.ran, again.marks, again.seconds) == (made.ran, made.marks, 12.5)
    assert list(again.remaining()) == list(range(2, len(JOBS)))
    assert again.counts() == {HOLDS: len(JOBS[0]) + len(JOBS[1]) - 2, FAILS: 1, REFUSED: 1}
    assert again.failing() == [bad]
    signature = again.marks[bad].signature
    assert signature is not None
    assert str(signature) == "diverged gradient in end"


def test_what_was_unknown_is_asked_again(tmp_path: Path):
    made = verdicts(tmp_path)
    made.take(0, [(JOBS[0][0], Mark(UNKNOWN, "the judge was lost"))])
    made.take(1, [])
    made.save()
    again = verdicts(tmp_path)
    assert 0 in again.remaining()
    assert not again.marks
    assert again.ran == set(JOBS[1])


def test_what_is_complete_is_made_anew(tmp_path: Path):
    made = verdicts(tmp_path)
    for number in range(len(JOBS)):
        made.take(number, [(JOBS[number][0], FAILED)])
    made.save()
    again = verdicts(tmp_path)
    assert (again.earlier, again.ran, again.marks) == (0, set(), {})
    assert len(list(again.remaining())) == len(JOBS)


def test_a_state_of_something_else_is_refused(tmp_path: Path):
    verdicts(tmp_path).save()
    with pytest.raises(InvalidRecord, match="certificate.json.subject: expected 'other"):
        verdicts(tmp_path, "other")
    with pytest.raises(InvalidRecord, match="Give another --state"):
        Verdicts(JOBS[1:], "toy", tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data | {"version": 99},
        lambda data: data | {"done": [10**6]},
        lambda data: data | {"marks": {"full_shard/2": {"status": "fails", "reason": ""}}},
        lambda data: data | {"done": "all"},
    ],
)
def test_a_damaged_state_is_refused(damage, tmp_path: Path):
    verdicts(tmp_path).save()
    file = tmp_path / "certificate.json"
    file.write_text(json.dumps(damage(json.loads(file.read_text()))))
    with pytest.raises(InvalidRecord, match=r"certificate\.json"):
        verdicts(tmp_path)


def test_a_cell_is_followed_to_one_that_fails_alike_and_not_from_a_wrong_dtype_to_a_wrong_number():
    def diverged(quantity: str) -> Mark:
        return Mark(FAILS, "why", ("diverged", quantity, "forward_backward"))

    number, output, dtype = map(diverged, ("gradient", "output", "gradient has another dtype"))
    assert _are_alike(number, output)
    assert _are_alike(dtype, dtype)
    assert not _are_alike(dtype, number)
    assert not _are_alike(output, dtype)
    assert not _are_alike(number, Mark(FAILS, "why", ("raised", "RuntimeError: no", "forward_backward")))
    assert not _are_alike(number, Mark(REFUSED, "not there"))
    assert not _are_alike(None, number)
