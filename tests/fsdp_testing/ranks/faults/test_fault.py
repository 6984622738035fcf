"""The text of a fault: what it says, and the one sentence about text that is none."""

from __future__ import annotations

import pytest

from fsdp_testing.errors import InvalidArgument
from fsdp_testing.ranks.faults.fault import Fault, check_together


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("crash@rank=2,step=40", ("crash", 0.0, 2, "step", 40)),
        ("delay=2.5@rank=1,collective=7", ("delay", 2.5, 1, "collective", 7)),
        ("stop@save=1", ("stop", 0.0, None, "save", 1)),
        ("memory=256MiB", ("memory", 256 * 2**20, None, "", 0)),
        ("clock=-60@rank=0", ("clock", -60.0, 0, "", 0)),
        ("full-disk@load=2,rank=0", ("full-disk", 0.0, 0, "load", 2)),
    ],
)
def test_a_fault_says_what_where_and_when(text, meaning):
    fault = Fault.parse(text)
    assert (fault.kind, fault.value, fault.rank, fault.place, fault.at) == meaning
    assert str(fault) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "crash",
        "crash@",
        "crash@rank=1",
        "crash=3@step=1",
        "crsh@step=1",
        "delay@step=1",
        "delay=-1@step=1",
        "delay=nan@step=1",
        "drop@step=1",
        "reorder@save=1",
        "corrupt@load=1",
        "crash@collective=0",
        "crash@step=-1",
        "crash@step=1,save=1",
        "crash@rank=1,rank=2,step=1",
        "crash@step=1,step=1",
        "crash@unit=1",
        "crash@step=x",
        "crash@step=1,",
        "crash@step=99999999999999",
        "memory=256",
        "clock=5",
        "crash@step=1\n",
        "crash@step=\u0661",
    ],
)
def test_text_that_is_no_fault_gives_one_sentence_with_kinds_and_places(text):
    with pytest.raises(InvalidArgument) as caught:
        Fault.parse(text)
    message = str(caught.value)
    assert message.endswith(f"got {text!r}.")
    for word in (
        "crash",
        "hang",
        "stop",
        "delay",
        "corrupt",
        "drop",
        "reorder",
        "slow-disk",
        "full-disk",
        "memory",
        "clock",
    ):
        assert word in message
    for place in ("collective", "step", "save", "load"):
        assert place in message


def test_a_rank_that_is_not_there_is_refused():
    with pytest.raises(InvalidArgument, match="expected a rank from 0 to 1, got 2 in 'crash@rank=2,step=0'"):
        Fault.parse("crash@rank=2,step=0", 2)


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (
            "crash@rank=1,step=4",
            "delay=1@step=4",
            "expected delay=1@step=4 to happen, got crash@rank=1,step=4 before it",
        ),
        ("hang@save=1", "hang@rank=0,save=1", "expected hang@rank=0,save=1 to happen, got hang@save=1 before it"),
        (
            "drop@collective=2",
            "reorder@rank=0,collective=2",
            "expected a collective that is either dropped or comes later",
        ),
    ],
)
def test_faults_at_one_place_that_exclude_each_other_are_refused(first, second, said):
    with pytest.raises(InvalidArgument, match=said):
        check_together([Fault.parse("clock=+5"), Fault.parse(first), Fault.parse(second)])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("delay=1@step=4", "crash@rank=1,step=4"),
        ("crash@rank=1,step=4", "delay=1@rank=0,step=4"),
        ("crash@rank=1,step=4", "delay=1@rank=1,step=5"),
        ("stop@collective=4", "delay=1@step=4"),
        ("drop@collective=2", "reorder@collective=3"),
        ("memory=1GiB", "full-disk"),
    ],
)
def test_other_faults_may_be_together(first, second):
    check_together([Fault.parse(first), Fault.parse(second)])
