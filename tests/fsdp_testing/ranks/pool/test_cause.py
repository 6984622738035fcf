"""Of all that ranks did, the sentence that leads is the one that explains the rest. No process is needed to see that."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_testing.ranks.pool.cause import cause_of, different_collectives, find_stuck, first_difference
from fsdp_testing.ranks.pool.outcome import CollectiveRecord, ErrorRecord, Fate, RankOutcome

KEY, OTHER = 7, 8
MEMBERS = {KEY: (0, 1), OTHER: (0, 1)}


def collective(number: int, what: str = "all_reduce(sum) float32[4]", key: int = KEY, signature: int = 1) -> Any:
    group = "default group" if key == KEY else "group 'g' of ranks [0, 1]"
    return CollectiveRecord(number, group, key, what, "t.py:3 in f", number, signature)


def outcome(rank: int, fate: Fate, *records: CollectiveRecord, **more: Any) -> RankOutcome:
    issued: dict[int, int] = {}
    digests: dict[int, int] = {}
    for record in records:
        issued[record.group_key] = max(record.number, issued.get(record.group_key, 0))
        digests[record.group_key] = hash((digests.get(record.group_key, 0), record.signature))
    more.setdefault("issued", issued)
    more.setdefault("digests", digests)
    more.setdefault("failed", fate is not Fate.RETURNED)
    return RankOutcome(rank, fate, collectives=records, **more)


def raised(rank: int, kind: str, text: str, at: float, *records: CollectiveRecord) -> RankOutcome:
    return outcome(rank, Fate.RAISED, *records, error=ErrorRecord(kind, text, "tb"), finished_at=at)


def died(rank: int, at: float, *records: CollectiveRecord, name: str = "SIGKILL") -> RankOutcome:
    return outcome(rank, Fate.DIED, *records, signal_name=name, finished_at=at)


def cause_in_words(*ranks: RankOutcome, deadline: float | None = None) -> str:
    cause = cause_of(ranks, MEMBERS, deadline)
    return cause.sentence() if cause is not None else ""


def test_all_is_well() -> None:
    assert cause_in_words(outcome(0, Fate.RETURNED, collective(1)), outcome(1, Fate.RETURNED, collective(1))) == ""


def test_a_death_explains_a_lost_connection() -> None:
    lost = raised(0, "RuntimeError", "[gloo] Connection closed by peer [127.0.0.1]", 1.0)
    assert cause_in_words(lost, died(1, 2.0)) == "rank 1 died by SIGKILL"


def test_different_collectives_explain_the_death_of_a_backend() -> None:
    issued = collective(1, signature=2)
    told = cause_in_words(died(0, 2.0, collective(1), name="SIGABRT"), outcome(1, Fate.RETURNED, issued))
    assert told.startswith("ranks disagree: collective #1 of the default group differs: rank 0 issued")


def test_ranks_with_groups_of_their_own_may_issue_more_but_no_other_collectives() -> None:
    one = outcome(0, Fate.RETURNED, collective(1))
    assert different_collectives([one, outcome(1, Fate.RETURNED)], MEMBERS) is None
    assert different_collectives([one, outcome(1, Fate.RETURNED, collective(1), collective(2))], MEMBERS) is None
    told = different_collectives([one, outcome(1, Fate.RETURNED, collective(1, signature=2))], MEMBERS)
    assert told is not None and told.number == 1
    lost = [outcome(rank, Fate.RETURNED, issued={KEY: 200}, digests={KEY: rank}) for rank in (0, 1)]
    assert different_collectives(lost, MEMBERS) is not None, "the digests differ, long after"


def test_an_exception_before_a_death_comes_first() -> None:
    assert (
        cause_in_words(raised(0, "ValueError", "own", 1.0), died(1, 2.0, name="SIGABRT"))
        == "rank 0 raised ValueError: own"
    )
    assert cause_in_words(raised(0, "ValueError", "own", 3.0), died(1, 2.0, name="SIGABRT")) == "rank 1 died by SIGABRT"


def test_the_first_of_several_deaths_comes_first() -> None:
    assert cause_in_words(died(0, 5.0, name="SIGABRT"), died(1, 4.0)) == "rank 1 died by SIGKILL"
    assert cause_in_words(died(0, 5.0), died(1, 4.0)) == "ranks 0, 1 died by SIGKILL"


def test_a_refused_mismatch_explains_everything() -> None:
    refused = raised(1, "CollectiveMismatch", "collective #1 differs", 9.0)
    assert cause_in_words(raised(0, "RuntimeError", "Connection reset by peer", 1.0), refused).startswith(
        "ranks disagree: collective #1 differs"
    )


def test_the_first_exception_that_is_no_consequence() -> None:
    ranks = (raised(0, "RuntimeError", "Broken pipe", 1.0), raised(1, "KeyError", "'k'", 2.0))
    assert cause_in_words(*ranks) == "rank 1 raised KeyError: 'k'"


def test_equal_exceptions_are_told_once() -> None:
    assert (
        cause_in_words(*(raised(r, "ValueError", "same\nrest", r) for r in range(2)))
        == "every rank raised ValueError: same"
    )
    mixed = (raised(0, "ValueError", "same", 1), raised(1, "ValueError", "same", 2), raised(2, "KeyError", "x", 3))
    assert cause_in_words(*mixed) == "ranks 0, 1 raised ValueError: same"


def test_who_waits_for_the_one_that_raised() -> None:
    waiting = outcome(0, Fate.STOPPED, collective(1), collective(2))
    bad = raised(1, "ValueError", "own", 1.0, collective(1))
    assert (
        cause_in_words(waiting, bad) == "rank 1 raised ValueError: own; rank 0 waited in all_reduce(sum) #2 float32[4]"
    )
    busy = outcome(0, Fate.STOPPED, collective(1))
    assert cause_in_words(busy, bad) == "rank 1 raised ValueError: own; rank 0 had not finished"


def test_an_early_return() -> None:
    ranks = (outcome(0, Fate.STOPPED, collective(1), collective(2)), outcome(1, Fate.RETURNED, collective(1)))
    assert cause_in_words(*ranks) == (
        "rank 0 waits in all_reduce(sum) #2 float32[4] at t.py:3 in f; rank 1 returned after #1"
    )
    none = (outcome(0, Fate.HUNG, collective(1)), outcome(1, Fate.RETURNED))
    assert cause_in_words(*none, deadline=3.0).endswith("rank 1 returned without any collective of that group")


def test_nobody_waits_for_a_rank_outside_the_group() -> None:
    ranks = (outcome(0, Fate.STOPPED, collective(1)), outcome(1, Fate.RETURNED))
    assert find_stuck(ranks, {KEY: (0,)}) is None


def test_nobody_waits_for_a_rank_whose_ledger_was_full() -> None:
    ranks = (outcome(0, Fate.STOPPED, collective(1)), outcome(1, Fate.RETURNED, uncompared=3))
    assert find_stuck(ranks, MEMBERS) is None
    returned = (outcome(0, Fate.RETURNED, collective(1)), outcome(1, Fate.RETURNED, uncompared=3))
    assert cause_in_words(*returned) == ""


def test_different_collectives_explain_a_wait() -> None:
    ranks = (
        outcome(0, Fate.HUNG, collective(1), collective(2, "broadcast(root=0) float32[4]", signature=5)),
        outcome(1, Fate.HUNG, collective(1), collective(2, signature=6)),
    )
    assert cause_in_words(*ranks, deadline=3.0) == (
        "ranks disagree: collective #2 of the default group differs: rank 0 issued broadcast(root=0) float32[4] at "
        "t.py:3 in f; rank 1 issued all_reduce(sum) float32[4] at t.py:3 in f"
    )


def test_other_shapes_of_one_signature_are_no_difference() -> None:
    ranks = (
        outcome(0, Fate.HUNG, collective(1, "all_reduce(sum) float32[2, 4]"), collective(2, signature=5)),
        outcome(1, Fate.HUNG, collective(1, "all_reduce(sum) float32[8]")),
    )
    assert first_difference(ranks, MEMBERS) is None


def test_a_deadline_is_the_last_resort() -> None:
    ranks = (outcome(0, Fate.HUNG, collective(1), collective(2)), outcome(1, Fate.HUNG, collective(1)))
    assert cause_in_words(*ranks, deadline=5.0) == (
        "ranks 0, 1 hung after 5 s (rank 1 is behind the others): rank 0 last issued all_reduce(sum) #2 float32[4]; "
        "rank 1 last issued all_reduce(sum) #1 float32[4]"
    )


def test_a_result_marked_as_failed() -> None:
    ranks = (outcome(0, Fate.RETURNED), outcome(1, Fate.RETURNED, failed=True))
    assert cause_in_words(*ranks) == "rank 1 failed"


@pytest.mark.parametrize("key", [KEY, OTHER])
def test_uneven_counts_at_the_end(key: int) -> None:
    ranks = (
        outcome(0, Fate.RETURNED, collective(1, key=key)),
        outcome(1, Fate.RETURNED, collective(1, key=key), collective(2, key=key)),
    )
    label = "default group" if key == KEY else "group 'g' of ranks [0, 1]"
    assert cause_in_words(*ranks) == (
        f"ranks disagree: they issued different numbers of collectives on the {label} (rank 0: 1, rank 1: 2)"
    )


def test_different_sequences_of_which_only_digests_are_left() -> None:
    ranks = (
        outcome(0, Fate.RETURNED, collective(200), digests={KEY: 1}),
        outcome(1, Fate.RETURNED, collective(200), digests={KEY: 2}),
    )
    assert "issued different collectives on the default group, before the last ones recorded" in cause_in_words(*ranks)


def test_a_timeout_of_the_group_names_who_was_missing() -> None:
    late = raised(0, "RuntimeError", "Timed out waiting 1000ms for recv", 1.0, collective(1))
    assert cause_in_words(late, outcome(1, Fate.STOPPED)) == (
        "rank 0 gave up waiting in all_reduce(sum) #1 float32[4] at t.py:3 in f (RuntimeError: Timed out waiting 1000ms "
        "for recv); rank 1 never joined it: it was stopped before any collective"
    )
    # A timeout of the test's own is reported as it is.
    own = raised(0, "TimeoutError", "timed out", 1.0, collective(1))
    assert cause_in_words(own, outcome(1, Fate.RETURNED, collective(1))) == "rank 0 raised TimeoutError: timed out"


def test_a_world_of_one_does_not_say_every() -> None:
    assert cause_in_words(raised(0, "ValueError", "x", 1.0)) == "rank 0 raised ValueError: x"
