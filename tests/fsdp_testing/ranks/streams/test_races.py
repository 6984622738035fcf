"""Uses of memory that nothing orders: histories in a small language, one entry a word.

`w1:a` is work that writes block a on stream 1, `r` reads, `s1<2` makes stream 1 wait for stream 2, `e7@1` records event 7 on
stream 1, `1<e7` makes stream 1 wait for it (`h` is the host), `new:a@1` allocates, `free:a` frees, `use:a@2` is record_stream,
`g1:a` is an all-gather on stream 1 that writes block a.
"""

from __future__ import annotations

import re

import pytest

from fsdp_testing.ranks.streams.history import (
    HOST,
    Access,
    Allocated,
    Entry,
    EventRecorded,
    EventWaited,
    Freed,
    History,
    StreamWaited,
    UseRecorded,
    Work,
)
from fsdp_testing.ranks.streams.races import FullBuffers, Race, StreamAccount, races, tell
from fsdp_testing.ranks.streams.regions import Region

WHOLE = Region(0, (4,), (8,), 8)
LEFT, RIGHT = Region(0, (2,), (8,), 8), Region(16, (2,), (8,), 8)
PARTS = {"": WHOLE, "l": LEFT, "r": RIGHT}


def entry(word: str) -> Entry:
    if found := re.fullmatch(r"([rw])(\d):(\w)([lr]?)", word):
        kind, number, block, part = found.groups()
        return Work(int(number), word, (Access(ord(block), PARTS[part], kind == "w"),), (f"code.py:{word}",))
    if found := re.fullmatch(r"g(\d):(\w)", word):
        return Work(int(found[1]), "_allgather_base_", (Access(ord(found[2]), WHOLE, True),), (f"code.py:{word}",))
    if found := re.fullmatch(r"s(\d|h)<(\d)", word):
        return StreamWaited(HOST if found[1] == "h" else int(found[1]), int(found[2]))
    if found := re.fullmatch(r"e(\d)@(\d)", word):
        return EventRecorded(int(found[1]), int(found[2]))
    if found := re.fullmatch(r"(\d|h)<e(\d)", word):
        return EventWaited(int(found[2]), HOST if found[1] == "h" else int(found[1]))
    if found := re.fullmatch(r"new:(\w)@(\d)", word):
        return Allocated(ord(found[1]), int(found[2]), f"tensor {found[1]}")
    if found := re.fullmatch(r"free:(\w)", word):
        return Freed(ord(found[1]), ("code.py:free",))
    found = re.fullmatch(r"use:(\w)@(\d)", word)
    assert found, word
    return UseRecorded(ord(found[1]), int(found[2]))


def history(words: str) -> History:
    return History([entry(word) for word in words.split()], {0: "the default stream", 1: "stream 1", 2: "stream 2"})


def judged(words: str) -> list[Race]:
    return races(history(words))


ORDERED = {
    "one stream": "w1:a r1:a w1:a",
    "reads do not conflict": "r1:a r2:a",
    "other blocks": "w1:a w2:b",
    "other parts": "w1:al w2:ar",
    "wait_stream": "w1:a s2<1 r2:a",
    "an event": "w1:a e7@1 2<e7 r2:a",
    "an event of a stream that waited": "w1:a s2<1 e7@2 3<e7 w3:a",
    "the host": "w1:a sh<1 r2:a",
    "the host, by an event": "w1:a e7@1 h<e7 w2:a",
    "a later event covers earlier work": "w1:a w1:b e7@1 2<e7 r2:a r2:b",
    "freed after a wait": "new:a@1 w2:a s1<2 free:a new:b@1 w1:b",
    "freed, and the owner waits before it allocates": "new:a@1 w2:a free:a s1<2 new:b@1 w1:b",
    "freed, and waited for between allocation and use": "new:a@1 w2:a free:a new:b@1 s1<2 w1:b",
    "record_stream": "new:a@1 r2:a use:a@2 free:a new:b@1 w1:b",
    "record_stream of a stream that waited for the other": "new:a@1 w3:a s2<3 r2:a use:a@2 free:a new:b@1 w1:b",
    "memory of another stream": "new:a@1 r2:a free:a new:b@3 w3:b",
    "freed and never used again": "new:a@1 r2:a free:a",
}

RACES = {
    "write then read": "w1:a r2:a",
    "write then write": "w1:a w2:a",
    "read then write": "r1:a w2:a",
    "an overlapping part": "w1:a w2:ar",
    "the event is recorded too early": "e7@1 w1:a 2<e7 r2:a",
    "the event is recorded anew": "w1:a e7@1 w1:b e7@3 2<e7 r2:a",
    "an event that was never recorded": "w1:a 2<e7 r2:a",
    "the wait is the wrong way round": "w1:a s1<2 r2:a",
    "the wait comes too early": "s2<1 w1:a r2:a",
    "the host waits for another stream": "w1:a sh<3 r2:a",
    "one of two reads is waited for": "r1:a r3:a s2<1 w2:a",
    "a write hides behind a read": "w1:a s3<1 r3:a r2:a",
    "freed while it is read": "new:a@1 r2:a free:a new:b@1 w1:b",
    "record_stream of the wrong stream": "new:a@1 r2:a use:a@3 free:a new:b@1 w1:b",
    "handed on twice": "new:a@1 r2:a free:a new:b@1 new:c@1 w1:c",
}


@pytest.mark.parametrize("words", ORDERED.values(), ids=list(ORDERED))
def test_what_is_ordered_is_no_race(words):
    assert judged(words) == []


@pytest.mark.parametrize("words", RACES.values(), ids=list(RACES))
def test_what_nothing_orders_is_a_race(words):
    assert len(judged(words)) == 1


def test_both_places_are_named():
    (race,) = judged("new:a@0 w1:a r2:a")
    assert (race.earlier.site, race.later.site) == (("code.py:w1:a",), ("code.py:r2:a",))
    assert race.summary == "nothing orders r2:a on stream 2 after w1:a on stream 1, in tensor a"
    text = tell([race])
    assert text.startswith("  1. Nothing orders")
    assert "code.py:w1:a" in text
    assert "code.py:r2:a" in text
    assert "Make stream 2 wait for stream 1 in between" in text


def test_memory_that_is_reused_names_where_it_was_freed():
    (race,) = judged("new:a@1 r2:a free:a new:b@1 w1:b")
    assert (race.block, race.reused, race.freed) == ("tensor a", "tensor b", ("code.py:free",))
    assert "record_stream" in str(race)
    assert "freed\n      code.py:free" in str(race)


def test_a_pair_of_places_is_told_once():
    assert len(judged("w1:a r2:a w1:a r2:a w1:a r2:a")) == 2  # a read after a write, and a write after a read
    assert len(judged("w1:a r2:a r2:a r2:a")) == 1


TWO = "g1:a s0<1 r0:a e7@0 free:a g1:b s0<1 r0:b free:b "


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (TWO + "g1:c", FullBuffers(1, 3, ("code.py:g1:c",))),
        (TWO + "h<e7 g1:c", FullBuffers(1, 2, ("code.py:g1:b",))),
        (TWO + "sh<0 g1:c", FullBuffers(1, 2, ("code.py:g1:b",))),
        ("g1:a s0<1 r0:a e7@0 r0:a free:a h<e7 g1:b", FullBuffers(1, 2, ("code.py:g1:b",))),
        ("w1:a s0<1 r0:a free:a w1:b s0<1 r0:b free:b g1:c", FullBuffers(1, 1, ("code.py:g1:c",))),
        ("g1:a s0<1 r0:a g1:b s0<1 r0:b g1:c", FullBuffers(3, 3, ("code.py:g1:c",))),
    ],
    ids=["never waited", "an event", "a stream", "an event before the last use", "no gathers", "not freed"],
)
def test_full_parameters_are_in_use_until_the_host_waited_for_their_last_use(words, expected):
    assert StreamAccount.of(history(words)).full_buffers == expected


def test_gathers_of_other_things_than_parameters_are_not_counted():
    recorded = history(TWO + "g1:c")
    assert StreamAccount.of(recorded, [recorded.streams[1]]).full_buffers == FullBuffers()
