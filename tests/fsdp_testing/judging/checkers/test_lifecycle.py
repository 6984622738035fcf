"""Rules of a unit's life on written histories: each is broken once and noticed."""

from __future__ import annotations

from fsdp_testing.cases.records.event import History, UnitEvent
from fsdp_testing.judging.checkers.event_rules import check_lifecycle, unsharded_before


def history(*transitions: str) -> History:
    events = []
    for number, text in enumerate(transitions):
        name, transition = text.split()
        events.append(UnitEvent(number, float(number), 0, unit=name, transition=transition))
    return History((tuple(events),))


def test_gather_and_free_in_turn_keep_the_rules() -> None:
    kept = history("a gather", "b gather", "a free", "b free", "a gather", "a free")
    assert check_lifecycle(kept) == ()
    assert unsharded_before(kept, 1) == {}


def test_a_second_gather_of_held_memory_is_noticed() -> None:
    (broken,) = check_lifecycle(history("a gather", "a gather", "a free"))
    assert (broken.rank, broken.unit) == (0, "a")
    assert "gathered again" in broken.sentence


def test_a_free_without_a_gather_is_noticed() -> None:
    (broken,) = check_lifecycle(history("a free"))
    assert "not gathered" in broken.sentence


def test_what_is_held_at_the_end_is_named() -> None:
    assert unsharded_before(history("a gather", "b gather", "b free"), 1) == {"a": (0,)}
