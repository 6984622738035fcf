"""Two recorders in one process: what each writes, what each sees of the other, and what it refuses."""

from __future__ import annotations

import _thread
import os
import queue
import threading

import pytest

from fsdp_testing.errors import CollectiveMismatch
from fsdp_testing.ranks.ledger import memory, recorder
from fsdp_testing.ranks.ledger.memory import ANYBODY, GROUPS, RING, LedgerMemory
from fsdp_testing.ranks.ledger.reading import AreaView
from fsdp_testing.ranks.ledger.records import (
    WAITS_FOR_NOBODY,
    Call,
    GroupIdentity,
    group_facts,
    group_identity,
    group_string,
)

SUM = Call(("all_reduce", ("sum",)), "all_reduce(sum)")
MAX = Call(("all_reduce", ("max",)), "all_reduce(max)")
SENT = Call(("broadcast", (0,)), "broadcast(root=0)", WAITS_FOR_NOBODY)
AWAITED = Call(("broadcast", (0,)), "broadcast(root=0)", 0)
WORLD = group_identity("0", (0, 1, 2), 3, True)
PAIR = group_identity("1", (0, 1), 3, True)
OTHERS = group_identity("2", (1, 2), 3, True)
ENDS = group_identity("3", (0, 2), 3, True)
DEVICE = group_identity("4", (0, 1), 3, False)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "other_threads", lambda: 0)


@pytest.fixture
def shared() -> LedgerMemory:
    descriptor = memory.create(3)
    shared = LedgerMemory(descriptor, 3)
    os.close(descriptor)
    return shared


@pytest.fixture
def ranks(shared: LedgerMemory) -> list[recorder.Recorder]:
    ranks = [recorder.Recorder(shared, rank) for rank in range(3)]
    for rank in ranks:
        rank.start_job(1)
    return ranks


def issue(rank: recorder.Recorder, group: GroupIdentity, call: Call = SUM, *, blocking: bool = False) -> None:
    rank.record(rank.line(group), call, blocking)
    rank.taken()


def waiting_for(shared: LedgerMemory) -> tuple[int | None, ...]:
    """Keys of the groups that ranks 0 and 1 wait in."""
    found = [area.waiting() for area in shared.areas[:2]]
    return tuple(None if waiting is None else waiting.group_key for waiting in found)


def test_equal_sequences(ranks: list[recorder.Recorder], shared: LedgerMemory) -> None:
    for call in (SUM, MAX, SUM):
        for rank in ranks:
            issue(rank, WORLD, call)
    ledgers = [AreaView(area).read(1) for area in shared.areas]
    assert [ledger.issued for ledger in ledgers] == [{WORLD.key: 3}] * 3
    assert len({ledger.digests[WORLD.key] for ledger in ledgers}) == 1
    assert [entry.what for entry in ledgers[1].entries] == ["all_reduce(sum)", "all_reduce(max)", "all_reduce(sum)"]
    assert ledgers[1].entries[0].call_site.endswith("in test_equal_sequences")
    assert ledgers[2].members == {WORLD.key: (0, 1, 2)}
    assert AreaView(shared.areas[0]).counts(1) == {WORLD.key: 3}


def test_a_thread_of_torch_has_few_frames_of_python(ranks: list[recorder.Recorder]) -> None:
    # The autograd engine runs the backward of a device on a thread of its own; DDP's reducer calls collectives there.
    outcome: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def call() -> None:
        try:
            ranks[0].record(ranks[0].line(WORLD), SUM, False)
        except Exception as error:  # whatever it is, the test shows it
            outcome.put(error)
        else:
            outcome.put(None)

    _thread.start_new_thread(call, ())
    assert outcome.get(timeout=60) is None


def test_the_digest_knows_the_order(ranks: list[recorder.Recorder], shared: LedgerMemory) -> None:
    for rank, calls in zip(ranks[:2], ((SUM, MAX), (MAX, SUM)), strict=True):
        alone = recorder.Recorder(shared, rank.rank, compare=True)
        alone.start_job(5 + rank.rank)
        for call in calls:
            issue(alone, PAIR, call)
    first, second = AreaView(shared.areas[0]).read(5), AreaView(shared.areas[1]).read(6)
    assert first.issued == second.issued
    assert first.digests != second.digests


def test_whoever_comes_second_refuses(ranks: list[recorder.Recorder], shared: LedgerMemory) -> None:
    issue(ranks[0], WORLD, SUM)
    with pytest.raises(
        CollectiveMismatch, match=r"collective #1 of the default group differs: rank 0 issued all_reduce"
    ):
        issue(ranks[1], WORLD, MAX)
    assert shared.areas[1].refused() == 1
    assert shared.areas[0].refused() == 0


def test_a_group_is_compared_among_its_members_only(ranks: list[recorder.Recorder]) -> None:
    issue(ranks[0], PAIR, SUM)
    issue(ranks[2], OTHERS, MAX)
    issue(ranks[1], PAIR, SUM)
    issue(ranks[1], OTHERS, MAX)
    assert [rank.issued() for rank in ranks] == [{PAIR.key: 1}, {PAIR.key: 1, OTHERS.key: 1}, {OTHERS.key: 1}]
    issue(ranks[2], OTHERS, MAX)
    with pytest.raises(CollectiveMismatch, match=r"#2 of the group '2' of ranks \[1, 2\] differs"):
        issue(ranks[1], OTHERS, SUM)


def test_an_earlier_job_does_not_count(ranks: list[recorder.Recorder]) -> None:
    issue(ranks[0], WORLD, SUM)
    ranks[1].start_job(2)
    issue(ranks[1], WORLD, MAX)
    ranks[0].start_job(2)
    issue(ranks[0], WORLD, MAX)
    with pytest.raises(CollectiveMismatch, match="#1 of the default group"):
        ranks[2].start_job(2)
        issue(ranks[2], WORLD, SUM)  # of this job, it does


def test_a_rank_far_ahead_is_no_difference(ranks: list[recorder.Recorder], shared: LedgerMemory) -> None:
    for _ in range(RING + 5):
        issue(ranks[0], PAIR, SUM)
    issue(ranks[1], PAIR, MAX)  # its entry has left the ring: the digests tell it at the end
    assert AreaView(shared.areas[0]).read(1).digests != AreaView(shared.areas[1]).read(1).digests


def test_a_half_written_entry_is_not_believed(ranks: list[recorder.Recorder], shared: LedgerMemory) -> None:
    issue(ranks[0], PAIR, SUM)
    area, words = shared.areas[0], shared.areas[0].words
    at = area.entry_word(area.slot_of(PAIR.key) or 0, 1)
    words[at] = memory.stamp(1 + RING, 1)  # a later entry has begun to replace it
    words[at + 1] += 1
    issue(ranks[1], PAIR, SUM)
    assert area.entry(area.slot_of(PAIR.key) or 0, 1) is None
    line = ranks[1].line(PAIR)
    ranks[1].withdraw(line, 1)
    words[at] = memory.stamp(1, 1)  # the same, written whole
    with pytest.raises(CollectiveMismatch, match="#1"):
        issue(ranks[1], PAIR, SUM)


def test_a_call_that_torch_refuses_is_taken_back(ranks: list[recorder.Recorder], shared: LedgerMemory) -> None:
    issue(ranks[0], PAIR, SUM)
    line = ranks[0].line(PAIR)
    ranks[0].record(line, MAX, True)
    ranks[0].withdraw(line, line.number)
    assert ranks[0].issued() == {PAIR.key: 1}
    assert shared.areas[0].waiting() is None
    issue(ranks[1], PAIR, SUM)
    issue(ranks[1], PAIR, SUM)
    issue(ranks[0], PAIR, SUM)
    assert AreaView(shared.areas[0]).read(1).digests == AreaView(shared.areas[1]).read(1).digests


def test_a_call_being_asked_for_is_waited_for(ranks: list[recorder.Recorder]) -> None:
    """Rank 0's call is with torch, which refuses it while rank 1 compares."""
    line = ranks[0].line(PAIR)
    ranks[0].record(line, MAX, False)
    timer = threading.Timer(0.05, ranks[0].withdraw, (line, 1))
    timer.start()
    issue(ranks[1], PAIR, SUM)
    timer.join()
    assert [rank.issued() for rank in ranks[:2]] == [{PAIR.key: 0}, {PAIR.key: 1}]


# ---- deadlocks


def test_opposite_order_of_two_groups(ranks: list[recorder.Recorder]) -> None:
    issue(ranks[0], PAIR, blocking=True)
    with pytest.raises(
        CollectiveMismatch, match=r"opposite order: rank 1 is about to wait .* for rank 0; rank 0 waits"
    ):
        issue(ranks[1], WORLD, blocking=True)


def test_a_cycle_over_three_ranks(ranks: list[recorder.Recorder]) -> None:
    issue(ranks[0], PAIR, blocking=True)  # for 1
    issue(ranks[1], OTHERS, blocking=True)  # for 2
    with pytest.raises(
        CollectiveMismatch, match=r"rank 2 is about to wait .* for rank 0; rank 0 waits .*; rank 1 waits"
    ):
        issue(ranks[2], ENDS, blocking=True)  # for 0


@pytest.mark.parametrize("blocking", [(False, True), (True, False)])
def test_somebody_who_does_not_block(
    ranks: list[recorder.Recorder], shared: LedgerMemory, blocking: tuple[bool, bool]
) -> None:
    issue(ranks[0], PAIR, blocking=blocking[0])
    issue(ranks[1], WORLD, blocking=blocking[1])
    assert waiting_for(shared) == (PAIR.key if blocking[0] else None, WORLD.key if blocking[1] else None)


def test_a_group_of_devices_does_not_block(ranks: list[recorder.Recorder], shared: LedgerMemory) -> None:
    issue(ranks[0], PAIR, blocking=True)
    issue(ranks[1], DEVICE, blocking=True)
    assert waiting_for(shared) == (PAIR.key, None)
    assert ranks[1].issued() == {DEVICE.key: 1}


def test_who_only_sends_waits_for_nobody(ranks: list[recorder.Recorder], shared: LedgerMemory) -> None:
    issue(ranks[0], PAIR, SENT, blocking=True)
    issue(ranks[1], WORLD, blocking=True)
    assert waiting_for(shared) == (None, WORLD.key)
    assert ranks[0].issued() == {PAIR.key: 1}


def test_who_waits_for_the_root_waits_for_nobody_else(ranks: list[recorder.Recorder], shared: LedgerMemory) -> None:
    issue(ranks[1], WORLD, AWAITED, blocking=True)
    waiting = shared.areas[1].waiting()
    assert waiting is not None
    assert waiting.awaited == 0
    issue(ranks[2], OTHERS, blocking=True)  # rank 1 will come, once the root has sent
    issue(ranks[0], WORLD, SENT, blocking=True)


def test_a_wait_that_is_over(ranks: list[recorder.Recorder], shared: LedgerMemory) -> None:
    for rank in ranks[:2]:
        issue(rank, PAIR, blocking=True)
    issue(ranks[1], WORLD, blocking=True)
    issue(ranks[0], PAIR, blocking=False)
    issue(ranks[0], WORLD, blocking=True)
    assert waiting_for(shared) == (WORLD.key, WORLD.key)
    assert [rank.issued() for rank in ranks[:2]] == [{PAIR.key: 2, WORLD.key: 1}, {PAIR.key: 1, WORLD.key: 1}]


def test_with_threads_no_wait_is_certain(
    ranks: list[recorder.Recorder], shared: LedgerMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "other_threads", lambda: 1)
    issue(ranks[0], PAIR, blocking=True)
    waiting = shared.areas[0].waiting()
    assert waiting is not None
    assert not waiting.alone
    assert waiting.awaited == ANYBODY
    monkeypatch.setattr(recorder, "other_threads", lambda: 0)
    issue(ranks[1], WORLD, blocking=True)


# ---- room


def test_more_groups_than_room(ranks: list[recorder.Recorder], shared: LedgerMemory) -> None:
    for index in range(GROUPS + 3):
        issue(ranks[0], group_identity(f"g{index}", (0, 1), 3, True))
    ledger = AreaView(shared.areas[0]).read(1)
    assert ledger.uncompared == 3
    assert list(ledger.issued.values()) == [1] * GROUPS
    ranks[0].start_job(2)
    assert AreaView(shared.areas[0]).read(2).uncompared == 0


def test_strings_never_run_out(ranks: list[recorder.Recorder], shared: LedgerMemory) -> None:
    for job in range(2, 30):
        ranks[0].start_job(job)
        for index in range(100):
            issue(ranks[0], PAIR, Call(("x", job, index), f"{job}.{index} " + "x" * 200))
        ledger = AreaView(shared.areas[0]).read(job, 100)
        assert [entry.what.split()[0] for entry in ledger.entries] == [f"{job}.{index}" for index in range(100)]
        assert all(entry.call_site.endswith("in test_strings_never_run_out") for entry in ledger.entries)
        assert ledger.members == {PAIR.key: (0, 1)}


def test_threads_record_side_by_side(ranks: list[recorder.Recorder], shared: LedgerMemory) -> None:
    groups = [group_identity(f"t{index}", (0, 1), 3, True) for index in range(4)]

    def loop(group: GroupIdentity) -> None:
        for index in range(300):
            issue(ranks[0], group, Call((group.key, index), f"{group.label} {index}"))

    threads = [threading.Thread(target=loop, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ledger = AreaView(shared.areas[0]).read(1, 1000)
    assert ledger.issued == {group.key: 300 for group in groups}
    for entry in ledger.entries:
        assert entry.what == f"{entry.group} {entry.number - 1}"


def test_a_rank_alone_compares_with_nobody(shared: LedgerMemory) -> None:
    alone = recorder.Recorder(shared, 0, compare=False)
    alone.start_job(1)
    everybody = group_identity("0", tuple(range(1024)), 1024, True)
    issue(alone, everybody, blocking=True)
    assert shared.areas[0].waiting() is None
    assert AreaView(shared.areas[0]).read(1).issued == {everybody.key: 1}


def test_the_listener_is_called(ranks: list[recorder.Recorder]) -> None:
    heard: list[tuple[int, str, str]] = []
    ranks[0].listener = lambda group, call, site: heard.append((group.key, call.text, site))
    issue(ranks[0], PAIR)
    assert heard[0][:2] == (PAIR.key, "all_reduce(sum)")
    assert heard[0][2].endswith("in test_the_listener_is_called")
    issue(ranks[0], PAIR, Call(("new_group", (0, 1)), "new_group [0, 1]", moves=False))
    assert len(heard) == 1


def test_the_members_of_a_large_group_are_all_there(shared: LedgerMemory) -> None:
    large = group_identity("large", tuple(range(1, 256)), 256, True)
    area = shared.areas[0]
    area.start_job(1)
    area.put_string(group_string(large))
    assert group_facts(area.strings())[large.key] == (large.label, large.members)
