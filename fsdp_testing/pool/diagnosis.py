"""Which one fact explains the rest? Pure: from every rank's outcome to the sentence that leads the report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fsdp_testing.pool.outcome import CollectiveRecord, Fate, RankOutcome

# What gloo and the store say when a peer has gone, or has not come in time.
_PEER_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Socket closed",
)
_PEER_LATE = ("Timed out waiting", "timed out", "Timeout", "wait timeout")

Members = Mapping[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Stuck:
    """Rank `waiting` issued collective `record` on a group with rank `gone`, which ended the job without it.

    `last` is what `gone` issued last on that group.
    """

    waiting: int
    gone: int
    record: CollectiveRecord
    last: CollectiveRecord | None


def cause_of(ranks: Sequence[RankOutcome], members: Members, deadline: float | None) -> str:
    """The leading sentence; empty when every rank returned and they agree.

    Order: a refused mismatch explains everything after it; of deaths and exceptions the first in time explains the
    others, except that an exception about a lost peer is never first; different collectives at the same place explain
    waits, an early return explains a wait; a deadline explains nothing and is the last resort.

    Args:
        ranks: outcome of every rank.
        members: ranks of every group seen, by group key.
        deadline: seconds allowed, when it passed; else None.
    """
    mismatch = [r for r in ranks if r.error is not None and r.error.type_name == "CollectiveMismatch"]
    died = sorted((r for r in ranks if r.fate is Fate.DIED), key=lambda r: r.finished_at)
    raised = sorted((r for r in ranks if r.fate is Fate.RAISED), key=lambda r: (_is_consequence(r), r.finished_at))
    own = [r for r in raised if not _is_consequence(r) and not (died and r.finished_at > died[0].finished_at)]
    if mismatch and mismatch[0].error is not None:
        return f"ranks disagree: {mismatch[0].error.message}"
    if died and not own:
        return _died_cause(died, ranks, members)
    if raised:
        late = _late_peer(raised, ranks, members)
        return late or _raised_cause(raised, ranks, members)
    return (
        first_difference(ranks, members)
        or _stuck_cause(ranks, members)
        or _hung_cause(ranks, deadline)
        or _failed_cause(ranks, members)
        or _uneven_cause(ranks, members)
    )


def _is_consequence(rank: RankOutcome) -> bool:
    return rank.error is not None and any(text in rank.error.message for text in _PEER_GONE)


def _names(ranks: Iterable[RankOutcome]) -> str:
    numbers = [str(rank.rank) for rank in ranks]
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(numbers)}"


def _died_cause(died: list[RankOutcome], ranks: Sequence[RankOutcome], members: Members) -> str:
    how = died[0].headline().partition(" died ")[2]
    same = sorted((r for r in died if r.headline().partition(" died ")[2] == how), key=lambda r: r.rank)
    return _with_companions(f"{_names(same)} died {how}", ranks, same, members)


def _raised_cause(raised: list[RankOutcome], ranks: Sequence[RankOutcome], members: Members) -> str:
    headline = raised[0].error.headline() if raised[0].error is not None else "an exception"
    same = sorted((r for r in raised if r.error is not None and r.error.headline() == headline), key=lambda r: r.rank)
    if len(same) == len(ranks) > 1:
        return f"every rank raised {headline}"
    return _with_companions(f"{_names(same)} raised {headline}", ranks, same, members)


def _late_peer(raised: list[RankOutcome], ranks: Sequence[RankOutcome], members: Members) -> str:
    """A collective gave up waiting (a group's own timeout), and the ledger knows who never joined it."""
    first = raised[0]
    last = first.last_collective()
    if last is None or first.error is None or not any(text in first.error.message for text in _PEER_LATE):
        return ""
    for peer in ranks:
        if _missed(peer, first, last, members) and peer.fate is not Fate.RAISED:
            how = peer.headline().partition(f"rank {peer.rank} ")[2]
            return (
                f"rank {first.rank} gave up waiting in {last} at {last.call_site} ({first.error.headline()}); "
                f"rank {peer.rank} never joined it: it {how}"
            )
    return ""


def _with_companions(lead: str, ranks: Sequence[RankOutcome], told: Sequence[RankOutcome], members: Members) -> str:
    waiting = [r for r in ranks if r not in told and r.fate in (Fate.STOPPED, Fate.HUNG)]
    if not waiting:
        return lead
    last = waiting[0].last_collective()
    waits = last is not None and any(_missed(peer, waiting[0], last, members) for peer in ranks)
    return f"{lead}; {_names(waiting)} {f'waited in {last}' if waits else 'had not finished'}"


def _missed(peer: RankOutcome, waiting: RankOutcome, last: CollectiveRecord, members: Members) -> bool:
    """Whether `peer` should have joined what `waiting` issued last, and has not."""
    if peer.rank == waiting.rank or peer.rank not in members.get(last.group_key, ()):
        return False
    return _issued(peer, last.group_key) < last.number


def _issued(rank: RankOutcome, key: int) -> float:
    # A group that found no room in the rank's ledger may have been used any number of times.
    return rank.issued.get(key, float("inf") if rank.uncompared else 0)


def find_stuck(ranks: Sequence[RankOutcome], members: Members) -> Stuck | None:
    """A rank that can never leave its last collective, because a member of the group returned without joining it."""
    for waiting in ranks:
        last = waiting.last_collective()
        if waiting.fate not in (Fate.HUNG, Fate.STOPPED) or last is None:
            continue
        for gone in ranks:
            if gone.fate is Fate.RETURNED and _missed(gone, waiting, last, members):
                theirs = [c for c in gone.collectives if c.group_key == last.group_key]
                return Stuck(waiting.rank, gone.rank, last, theirs[-1] if theirs else None)
    return None


def _stuck_cause(ranks: Sequence[RankOutcome], members: Members) -> str:
    stuck = find_stuck(ranks, members)
    return tell_stuck(stuck, ranks) if stuck is not None else ""


def tell_stuck(stuck: Stuck, ranks: Sequence[RankOutcome]) -> str:
    """One sentence for an early return."""
    after = f"after #{stuck.last.number}" if stuck.last is not None else "without any collective of that group"
    gone = next(rank for rank in ranks if rank.rank == stuck.gone)
    how = "failed" if gone.failed else "returned"
    return f"rank {stuck.waiting} waits in {stuck.record} at {stuck.record.call_site}; rank {stuck.gone} {how} {after}"


def _hung_cause(ranks: Sequence[RankOutcome], deadline: float | None) -> str:
    hung = [r for r in ranks if r.fate is Fate.HUNG]
    if not hung:
        return ""
    limit = f" after {deadline:g} s" if deadline is not None else ""
    lasts = "; ".join(
        f"rank {r.rank} last issued {r.last_collective()}" if r.collectives else f"rank {r.rank} issued no collective"
        for r in ranks
    )
    return f"{_names(hung)} hung{limit}{_furthest_behind(hung)}: {lasts}"


def _furthest_behind(hung: list[RankOutcome]) -> str:
    totals = {rank.rank: sum(rank.issued.values()) for rank in hung}
    if len(set(totals.values())) <= 1:
        return ""
    least = min(totals.values())
    behind = [rank for rank in hung if totals[rank.rank] == least]
    return f" ({_names(behind)} {'is' if len(behind) == 1 else 'are'} behind the others)"


def _failed_cause(ranks: Sequence[RankOutcome], members: Members) -> str:
    failed = [r for r in ranks if r.failed and r.fate is Fate.RETURNED]
    return _with_companions(f"{_names(failed)} failed", ranks, failed, members) if failed else ""


def _uneven_cause(ranks: Sequence[RankOutcome], members: Members) -> str:
    """All returned, but not after the same collectives: somebody issued one that nobody waited for."""
    for key, group in members.items():
        counts = {rank.rank: _issued(rank, key) for rank in ranks if rank.rank in group}
        known = {count for count in counts.values() if count != float("inf")}
        label = _label(ranks, key)
        if len(known) > 1:
            told = ", ".join(f"rank {rank}: {count:g}" for rank, count in counts.items())
            return f"ranks disagree: they issued different numbers of collectives on the {label} ({told})"
        if len({rank.digests[key] for rank in ranks if rank.rank in group and key in rank.digests}) > 1:
            return f"ranks disagree: they issued different collectives on the {label}, before the last ones recorded"
    return ""


def _label(ranks: Sequence[RankOutcome], key: int) -> str:
    return next((c.group for r in ranks for c in r.collectives if c.group_key == key), "a group")


def first_difference(ranks: Sequence[RankOutcome], members: Members) -> str:
    """Different collectives at the same place of a group, where nobody refused: all wrote at the same moment."""
    for key, group in members.items():
        if len({rank.digests[key] for rank in ranks if rank.rank in group and key in rank.digests}) <= 1:
            continue
        by_number: dict[int, dict[int, CollectiveRecord]] = {}
        for rank in ranks:
            for record in rank.collectives:
                if record.group_key == key:
                    by_number.setdefault(record.number, {})[rank.rank] = record
        for number in sorted(by_number):
            records = by_number[number]
            if len({record.signature for record in records.values()}) > 1:
                told = "; ".join(f"rank {r} issued {c.what} at {c.call_site}" for r, c in records.items())
                return f"ranks disagree: collective #{number} of the {_label(ranks, key)} differs: {told}"
    return ""
