"""Ranks see each other in every order that a processor may choose: all orders are gone through, on two models.

What the ledger does is written here in its smallest form. The recorder itself is then watched: it crosses the fence where
these programs do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import memory_models
import pytest
from memory_models import FENCE, POST, TRY_WAIT, Load, Store

from fsdp_testing.errors import CollectiveMismatch
from fsdp_testing.ranks.ledger import memory, recorder
from fsdp_testing.ranks.ledger.fence import Fence
from fsdp_testing.ranks.ledger.memory import LedgerMemory, OwnArea
from fsdp_testing.ranks.ledger.records import Call, group_identity

MODELS = {"x86": memory_models.total_store_order, "weak": memory_models.weakly_ordered}
every_processor = pytest.mark.parametrize("results", MODELS.values(), ids=MODELS)
Results = Callable[[memory_models.Programs], set[memory_models.Result]]


def writes_then_reads(ranks: int, between: tuple[memory_models.Step, ...]) -> memory_models.Programs:
    """Each rank writes its entry, then reads the entries of all others; register `ab`: what a saw of b."""
    return tuple(
        (
            Store(f"entry{me}", 1),
            *between,
            *(Load(f"entry{other}", f"{me}{other}") for other in range(ranks) if other != me),
        )
        for me in range(ranks)
    )


def missed_each_other(result: memory_models.Result) -> bool:
    return not any(dict(result).values())


def nobody_saw_all(result: memory_models.Result) -> bool:
    seen = dict(result)
    readers = {register[0] for register in seen}
    return not any(all(seen[name] for name in seen if name[0] == reader) for reader in readers)


@every_processor
def test_without_a_fence_two_ranks_miss_each_other(results: Results) -> None:
    """As the ledger did until it had a fence: a mismatch went on to the backend."""
    assert any(missed_each_other(result) for result in results(writes_then_reads(2, ())))


@every_processor
def test_with_the_fence_one_of_two_sees_the_other(results: Results) -> None:
    found = results(writes_then_reads(2, FENCE))
    assert len(found) == 3, "the first, the second, or both of them"
    assert not any(missed_each_other(result) for result in found)


@every_processor
def test_with_the_fence_somebody_sees_the_whole_circle(results: Results) -> None:
    """Three ranks that wait for each other: the last one to cross refuses."""
    assert any(nobody_saw_all(result) for result in results(writes_then_reads(3, ())))
    assert not any(nobody_saw_all(result) for result in results(writes_then_reads(3, FENCE)))


@pytest.mark.parametrize("between", [(POST,), (TRY_WAIT,), (TRY_WAIT, POST)])
def test_half_a_fence_does_for_x86_alone(between: tuple[memory_models.Step, ...]) -> None:
    programs = writes_then_reads(2, between)
    assert not any(map(missed_each_other, memory_models.total_store_order(programs)))
    assert any(map(missed_each_other, memory_models.weakly_ordered(programs)))


def new_table(before_flag: tuple[memory_models.Step, ...], after_flag: tuple[memory_models.Step, ...]):
    """A rank fills its tables and then says so (a new epoch, a greater length); a peer that sees it reads them."""
    return (
        (Store("table", 1), *before_flag, Store("flag", 1)),
        (Load("flag", "flag"), *after_flag, Load("table", "table")),
    )


def flag_without_table(result: memory_models.Result) -> bool:
    return dict(result) == {"flag": 1, "table": 0}


def test_tables_are_read_as_they_were_when_their_length_was_written() -> None:
    assert not any(map(flag_without_table, memory_models.total_store_order(new_table((), ()))))
    for half in (new_table((), ()), new_table(FENCE, ()), new_table((), FENCE)):
        assert any(map(flag_without_table, memory_models.weakly_ordered(half)))
    assert not any(map(flag_without_table, memory_models.weakly_ordered(new_table(FENCE, FENCE))))


# ------------------------------------------------------------------------------------------ the recorder itself
SUM, MAX = Call(("all_reduce", ("sum",)), "all_reduce(sum)"), Call(("all_reduce", ("max",)), "all_reduce(max)")
PAIR = group_identity("0", (0, 1), 2, True)
OTHER = group_identity("1", (0, 1), 2, True)


@pytest.fixture
def shared() -> Iterator[LedgerMemory]:
    descriptor = memory.create(2)
    shared = LedgerMemory(descriptor, 2)
    os.close(descriptor)
    yield shared
    shared.close()


class Late:
    """Has a peer do something in the moment when a rank crosses the fence, and not sooner."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.crossings = 0
        self.act: Callable[[], None] = lambda: None
        cross = Fence.cross

        def crossed(fence: Fence) -> None:
            self.crossings += 1
            act, self.act = self.act, lambda: None
            act()
            cross(fence)

        monkeypatch.setattr(Fence, "cross", crossed)


def test_the_fence_is_between_the_entry_and_the_comparison(
    shared: LedgerMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = Late(monkeypatch)
    first, second = recorder.Recorder(shared, 0), recorder.Recorder(shared, 1)
    for rank in (second, first):  # the first finds the second's place in the table, which takes the fence too
        rank.start_job(1)
        rank.record(rank.line(PAIR), SUM, False)
        rank.taken()
    written: list[bool] = []
    put = OwnArea.put_entry

    def peer_comes() -> None:
        written.append(True)
        area = shared.areas[1]
        put(area, 0, (memory.stamp(2, 1), 77, 0, 0, 0, memory.stamp(2, 1)), 5)

    def entry_is_written(area: OwnArea, *record: object) -> None:
        put(area, *record)  # type: ignore[arg-type]
        late.act = peer_comes

    monkeypatch.setattr(OwnArea, "put_entry", entry_is_written)
    with pytest.raises(CollectiveMismatch, match="collective #2"):
        first.record(first.line(PAIR), MAX, False)
    assert written, "the rank crossed no fence after it wrote its entry"


def test_the_fence_is_between_the_wait_and_the_search(shared: LedgerMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "other_threads", lambda: 0)
    late = Late(monkeypatch)
    first, second = recorder.Recorder(shared, 0), recorder.Recorder(shared, 1)
    for rank in (first, second):
        rank.start_job(1)
    wait = OwnArea.put_waiting
    here = first.line(PAIR)

    def says_that_it_waits(area: OwnArea, *record: int, alone: bool) -> None:
        wait(area, *record, alone=alone)
        if area is shared.areas[0]:
            late.act = lambda: second.record(second.line(OTHER), SUM, True)

    monkeypatch.setattr(OwnArea, "put_waiting", says_that_it_waits)
    with pytest.raises(CollectiveMismatch, match="opposite order"):
        first.record(here, SUM, True)


def test_tables_and_their_lengths_have_a_fence_between(shared: LedgerMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    late = Late(monkeypatch)
    area = shared.areas[0]
    for write, what in (
        (lambda: area.start_job(1), "emptied tables, then the epoch"),
        (lambda: area.put_group(5), "a key, then the number of groups"),
        (lambda: area.put_string("text"), "a text, then the number of texts"),
    ):
        before = late.crossings
        write()
        assert late.crossings == before + 1, what
    for read in (area.groups, area.strings, lambda: area.slot_of(5)):
        before = late.crossings
        read()
        assert late.crossings == before + 2, "after the epoch, and after the length"


def test_a_crossing_that_was_cut_short_stops_nobody(shared: LedgerMemory) -> None:
    """A rank that is killed between the two halves leaves one count too many."""
    from fsdp_testing.ranks.ledger import fence

    fence._post(shared.fence._place)
    for _ in range(3):
        shared.fence.cross()


def test_memory_can_be_given_back(shared: LedgerMemory) -> None:
    shared.close()
    shared.close()
    with pytest.raises(AttributeError):
        shared.fence.cross()
