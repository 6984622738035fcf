"""Finds the one fact that explains the rest. Pure: from every rank's outcome to the cause that leads the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fsdp_testing.ranks.pool.cause import Cause, Diverged, EndedBadly, GaveUp, Hung, Refused, Stuck, Uneven, Unfinished
from fsdp_testing.ranks.pool.outcome import CollectiveRecord, Fate, RankOutcome

# What gloo and the store say when a peer has gone, or has not come in time. Both raise a bare RuntimeError or DistError, so that
# their text is all there is to go by. It decides which error leads a report, never a verdict.
_PEER_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Socket closed",
)
_PEER_LATE = ("Timed out waiting", "timed out", "Timeout", "wait timeout")

Members = Mapping[int, tuple[int, ...]]


def cause_of(ranks: Sequence[RankOutcome], members: Members, deadline: float | None) -> Cause | None:
    """Return what leads the report; None when every rank returned and they agree.

    Order: a refused mismatch explains everything after it; of deaths and exceptions the first in time explains the
    others, except that an exception about a lost peer is never first; different collectives at the same place explain
    waits, an early return explains a wait; a deadline explains nothing and is the last resort.

    Args:
        ranks: Outcome of every rank.
        members: Ranks of every group seen, by group key.
        deadline: Seconds allowed, when it passed; else None.
    """
    died = sorted((r for r in ranks if r.fate is Fate.DIED), key=lambda r: r.finished_at)
    raised = sorted((r for r in ranks if r.fate is Fate.RAISED), key=lambda r: (_is_consequence(r), r.finished_at))
    # What is raised after the first death is its echo, whatever it says.
    own = [r for r in raised if not _is_consequence(r) and not (died and r.finished_at > died[0].finished_at)]
    for rank in ranks:
        if rank.error is not None and rank.error.type_name == "CollectiveMismatch":
            return Refused(rank.rank, rank.error)
    if died and not own:
        alike = [rank for rank in died if rank.ending() == died[0].ending()]
        return _ended_badly(alike, ranks, members)
    if raised:
        alike = [rank for rank in raised if rank.ending() == raised[0].ending()]
        late = _late_peer(raised[0], ranks, members)
        return late or _ended_badly(alike, ranks, members, everyone=len(alike) == len(ranks) > 1)
    failed = [rank for rank in ranks if rank.failed and rank.fate is Fate.RETURNED]
    return (
        first_difference(ranks, members)
        or find_stuck(ranks, members)
        or _hung_cause(ranks, deadline)
        or (_ended_badly(failed, ranks, members) if failed else None)
        or _uneven_cause(ranks, members)
    )


def reports_lost_peer(message: str) -> bool:
    """Return whether an error's message says only that a peer has gone."""
    return any(text in message for text in _PEER_GONE)


def _is_consequence(rank: RankOutcome) -> bool:
    return rank.error is not None and reports_lost_peer(rank.error.message)


def _ended_badly(alike: list[RankOutcome], ranks: Sequence[RankOutcome], members: Members, **more: bool) -> EndedBadly:
    return EndedBadly(_numbers(alike), alike[0], _unfinished(ranks, alike, members), **more)


def _numbers(ranks: Sequence[RankOutcome]) -> tuple[int, ...]:
    return tuple(sorted(rank.rank for rank in ranks))


def _unfinished(ranks: Sequence[RankOutcome], leading: Sequence[RankOutcome], members: Members) -> Unfinished | None:
    waiting = [r for r in ranks if r not in leading and r.fate in (Fate.STOPPED, Fate.HUNG)]
    if not waiting:
        return None
    last = waiting[0].last_collective()
    waits = last is not None and any(_missed(peer, waiting[0], last, members) for peer in ranks)
    return Unfinished(_numbers(waiting), last if waits else None)


def _late_peer(first: RankOutcome, ranks: Sequence[RankOutcome], members: Members) -> Cause | None:
    """A collective gave up waiting (a group's own timeout), and the ledger knows who never joined it."""
    last = first.last_collective()
    if last is None or first.error is None or not any(text in first.error.message for text in _PEER_LATE):
        return None
    for peer in ranks:
        if _missed(peer, first, last, members) and peer.fate is not Fate.RAISED:
            return GaveUp(first.rank, last, first.error, peer)
    return None


def _missed(peer: RankOutcome, waiting: RankOutcome, last: CollectiveRecord, members: Members) -> bool:
    """Whether `peer` should have joined what `waiting` issued last, and has not."""
    if peer.rank == waiting.rank or peer.rank not in members.get(last.group_key, ()):
        return False
    return _issued(peer, last.group_key) < last.number


def _issued(rank: RankOutcome, key: int) -> float:
    # A group that found no room in the rank's ledger may have been used any number of times.
    return rank.issued.get(key, float("inf") if rank.uncompared else 0)


def find_stuck(ranks: Sequence[RankOutcome], members: Members) -> Stuck | None:
    """Return a rank that can never leave its last collective: a member of the group returned without joining it."""
    for waiting in ranks:
        last = waiting.last_collective()
        if waiting.fate not in (Fate.HUNG, Fate.STOPPED) or last is None:
            continue
        for gone in ranks:
            if gone.fate is Fate.RETURNED and _missed(gone, waiting, last, members):
                theirs = [c for c in gone.collectives if c.group_key == last.group_key]
                return Stuck(waiting.rank, gone.rank, last, theirs[-1] if theirs else None, gone.failed)
    return None


def _hung_cause(ranks: Sequence[RankOutcome], deadline: float | None) -> Cause | None:
    totals = {rank.rank: sum(rank.issued.values()) for rank in ranks if rank.fate is Fate.HUNG}
    if not totals:
        return None
    least = min(totals.values())
    behind = tuple(rank for rank, total in totals.items() if total == least) if len(set(totals.values())) > 1 else ()
    return Hung(tuple(totals), deadline, behind, tuple((r.rank, r.last_collective()) for r in ranks))


def _uneven_cause(ranks: Sequence[RankOutcome], members: Members) -> Cause | None:
    """All returned, but not after the same collectives: somebody issued one that nobody waited for."""
    for key, group in members.items():
        counts = {rank.rank: _issued(rank, key) for rank in ranks if rank.rank in group}
        if len({count for count in counts.values() if count != float("inf")}) > 1:
            return Uneven(_label(ranks, key), tuple(counts.items()))
        if _digests_differ(ranks, key, group):
            return Diverged(_label(ranks, key))
    return None


def _digests_differ(ranks: Sequence[RankOutcome], key: int, group: tuple[int, ...]) -> bool:
    return len({rank.digests[key] for rank in ranks if rank.rank in group and key in rank.digests}) > 1


def _label(ranks: Sequence[RankOutcome], key: int) -> str:
    return next((c.group for r in ranks for c in r.collectives if c.group_key == key), "a group")


def first_difference(ranks: Sequence[RankOutcome], members: Members) -> Diverged | None:
    """Return different collectives at the same place of a group, where nobody refused: all wrote at the same moment."""
    for key, group in members.items():
        if not _digests_differ(ranks, key, group):
            continue
        by_number: dict[int, dict[int, CollectiveRecord]] = {}
        for rank in ranks:
            for record in rank.collectives:
                if record.group_key == key:
                    by_number.setdefault(record.number, {})[rank.rank] = record
        for number in sorted(by_number):
            records = by_number[number]
            if len({record.signature for record in records.values()}) > 1:
                return Diverged(_label(ranks, key), number, tuple(records.items()))
    return None
