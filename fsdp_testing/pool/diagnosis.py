"""Which one fact explains the rest? Pure: from every rank's outcome to the sentence that leads the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_testing.pool.outcome import CollectiveRecord, Fate, RankOutcome

_CONSEQUENCES = ("Connection closed by peer", "Connection reset by peer", "Connection refused", "Broken pipe")


@dataclass(frozen=True, slots=True)
class Stuck:
    """Rank `waiting` issued collective `record` on a group with rank `gone`, which ended the job without it.

    `last` is what `gone` issued last on that group.
    """

    waiting: int
    gone: int
    record: CollectiveRecord
    last: CollectiveRecord | None


def cause_of(ranks: Sequence[RankOutcome], members: dict[int, tuple[int, ...]], deadline: float | None) -> str:
    """The leading sentence; empty when every rank returned and they agree.

    Order: a death explains other ranks' connection errors; a refused mismatch explains waits; an exception explains
    waits; an early return explains a wait; a deadline explains nothing but is the last resort.

    Args:
        ranks: outcome of every rank.
        members: ranks of every group seen, by group key.
        deadline: seconds allowed, when it passed; else None.
    """
    died = [rank for rank in ranks if rank.fate is Fate.DIED]
    if died:
        return _with_companions(died[0].headline(), ranks, died[0].rank, members)
    raised = sorted((r for r in ranks if r.fate is Fate.RAISED), key=lambda r: (_is_consequence(r), r.finished_at))
    mismatch = [r for r in raised if r.error is not None and r.error.type_name == "CollectiveMismatch"]
    if mismatch and mismatch[0].error is not None:
        return f"ranks disagree: {mismatch[0].error.message}"
    if raised:
        return _raised_cause(raised, ranks, members)
    stuck = find_stuck(ranks, members)
    if stuck is not None:
        return tell_stuck(stuck, ranks)
    hung = [r for r in ranks if r.fate is Fate.HUNG]
    if hung:
        return _hung_cause(hung, ranks, deadline)
    failed = [r for r in ranks if r.failed]
    if failed:
        return _with_companions(f"{_names(failed)} failed", ranks, failed[0].rank, members)
    return _uneven_cause(ranks, members)


def _is_consequence(rank: RankOutcome) -> bool:
    return rank.error is not None and any(text in rank.error.message for text in _CONSEQUENCES)


def _names(ranks: Sequence[RankOutcome]) -> str:
    numbers = ", ".join(str(rank.rank) for rank in ranks)
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"


def _raised_cause(raised: list[RankOutcome], ranks: Sequence[RankOutcome], members: dict[int, tuple[int, ...]]) -> str:
    first = raised[0]
    headline = first.error.headline() if first.error is not None else "an exception"
    same = [r for r in raised if r.error is not None and r.error.headline() == headline]
    if len(same) == len(ranks):
        return f"every rank raised {headline}"
    return _with_companions(f"{_names(sorted(same, key=lambda r: r.rank))} raised {headline}", ranks, first.rank, members)


def _with_companions(lead: str, ranks: Sequence[RankOutcome], rank: int, members: dict[int, tuple[int, ...]]) -> str:
    waiting = [r for r in ranks if r.rank != rank and r.fate in (Fate.STOPPED, Fate.HUNG)]
    if not waiting:
        return lead
    last = waiting[0].last_collective()
    told = f"waited in {last}" if last is not None and _waits(waiting[0], ranks, members) else "had not finished"
    return f"{lead}; {_names(waiting)} {told}"


def _waits(waiting: RankOutcome, ranks: Sequence[RankOutcome], members: dict[int, tuple[int, ...]]) -> bool:
    last = waiting.last_collective()
    if last is None:
        return False
    peers = [r for r in ranks if r.rank in members.get(last.group_key, ()) and r.rank != waiting.rank]
    return any(peer.issued.get(last.group_key, 0) < last.number for peer in peers)


def find_stuck(ranks: Sequence[RankOutcome], members: dict[int, tuple[int, ...]]) -> Stuck | None:
    """A rank that can never leave its last collective, because a member of the group returned without joining it."""
    for waiting in ranks:
        last = waiting.last_collective()
        if waiting.fate not in (Fate.HUNG, Fate.STOPPED) or last is None:
            continue
        for gone in ranks:
            if gone.fate is not Fate.RETURNED or gone.rank not in members.get(last.group_key, ()):
                continue
            if gone.issued.get(last.group_key, 0) < last.number:
                theirs = [c for c in gone.collectives if c.group_key == last.group_key]
                return Stuck(waiting.rank, gone.rank, last, theirs[-1] if theirs else None)
    return None


def tell_stuck(stuck: Stuck, ranks: Sequence[RankOutcome]) -> str:
    """One sentence for an early return."""
    after = f"after #{stuck.last.number}" if stuck.last is not None else "without any collective of that group"
    waiting = ranks[stuck.waiting]
    how = "failed" if ranks[stuck.gone].failed else "returned"
    at = waiting.collectives[-1].call_site
    return f"rank {stuck.waiting} waits in {stuck.record} at {at}; rank {stuck.gone} {how} {after}"


def _hung_cause(hung: list[RankOutcome], ranks: Sequence[RankOutcome], deadline: float | None) -> str:
    limit = f" after {deadline:g} s" if deadline is not None else ""
    behind = _furthest_behind(hung)
    lasts = "; ".join(
        f"rank {r.rank} last issued {r.last_collective()}" if r.collectives else f"rank {r.rank} issued no collective"
        for r in ranks
    )
    return f"{_names(hung)} hung{limit}{behind}: {lasts}"


def _furthest_behind(hung: list[RankOutcome]) -> str:
    totals = {rank.rank: sum(rank.issued.values()) for rank in hung}
    if len(set(totals.values())) <= 1:
        return ""
    least = min(totals.values())
    return f" (rank {next(r for r, total in totals.items() if total == least)} is behind the others)"


def _uneven_cause(ranks: Sequence[RankOutcome], members: dict[int, tuple[int, ...]]) -> str:
    """All returned, but not after the same collectives: somebody issued one that nobody waited for."""
    for key, group in members.items():
        counts = {rank.rank: rank.issued.get(key, 0) for rank in ranks if rank.rank in group}
        if len(set(counts.values())) > 1:
            told = ", ".join(f"rank {rank}: {count}" for rank, count in counts.items())
            label = next((c.group for r in ranks for c in r.collectives if c.group_key == key), "a group")
            return f"ranks disagree: they issued different numbers of collectives on the {label} ({told})"
        if len({rank.digests.get(key, 0) for rank in ranks if rank.rank in group}) > 1:
            return _first_difference(ranks, key, group)
    return ""


def _first_difference(ranks: Sequence[RankOutcome], key: int, group: tuple[int, ...]) -> str:
    """Same counts, other collectives: nobody saw it while it ran, since all wrote at the same moment."""
    by_number: dict[int, dict[int, CollectiveRecord]] = {}
    label = "a group"
    for rank in ranks:
        for record in rank.collectives:
            if rank.rank in group and record.group_key == key:
                by_number.setdefault(record.number, {})[rank.rank] = record
                label = record.group
    for number in sorted(by_number):
        records = by_number[number]
        if len({record.what for record in records.values()}) > 1:
            told = "; ".join(f"rank {r} issued {c.what} at {c.call_site}" for r, c in records.items())
            return f"ranks disagree: collective #{number} of the {label} differs: {told}"
    return f"ranks disagree: they issued different collectives on the {label}, before the last ones recorded"
