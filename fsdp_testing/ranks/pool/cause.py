"""The causes that a world's outcome can have, as data, and the choice of the one that explains the rest.

Each cause makes its sentence, and nothing parses one. Pure: from every rank's outcome to the cause that leads the report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdp_testing.ranks.pool.outcome import CollectiveRecord, ErrorRecord, Fate, RankOutcome, rank_names


@dataclass(frozen=True, slots=True)
class Cause:
    """One fact that explains the rest; subclasses are the kinds."""

    def sentence(self) -> str:
        """Return the sentence that leads an account."""
        raise NotImplementedError

    def clause_of(self, ranks: Sequence[int]) -> str:
        """Return what the sentence says about `ranks`, which had not ended; empty if it is not about exactly these ranks."""
        del ranks
        return ""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """Ranks that had not ended when another one failed.

    `collective` is the one in which the first of them waited and which a peer never joined; None when none is known to wait.
    """

    ranks: tuple[int, ...]
    collective: CollectiveRecord | None

    def clause(self) -> str:
        """Return the clause that follows the cause."""
        how = f"waited in {self.collective}" if self.collective is not None else "had not finished"
        return f"{rank_names(self.ranks)} {how}"


@dataclass(frozen=True, slots=True)
class EndedBadly(Cause):
    """`ranks` died, raised or returned a failure in the same way, `first` before the others.

    `everyone` when every rank of several raised; `unfinished` are the ranks that had not ended by then.
    """

    ranks: tuple[int, ...]
    first: RankOutcome
    unfinished: Unfinished | None = None
    everyone: bool = False

    def sentence(self) -> str:
        how = "failed" if self.first.fate is Fate.RETURNED else self.first.ending()
        lead = f"{'every rank' if self.everyone else rank_names(self.ranks)} {how}"
        return lead if self.unfinished is None else f"{lead}; {self.unfinished.clause()}"

    def clause_of(self, ranks: Sequence[int]) -> str:
        others = self.unfinished
        return others.clause() if others is not None and set(others.ranks) == set(ranks) else ""


@dataclass(frozen=True, slots=True)
class Refused(Cause):
    """`rank` refused a collective before it began, because a peer had issued a different one; `error` says which."""

    rank: int
    error: ErrorRecord

    def sentence(self) -> str:
        return f"ranks disagree: {self.error.message}"


@dataclass(frozen=True, slots=True)
class GaveUp(Cause):
    """`rank` stopped waiting in `collective` at the group's own timeout, with `error`; `missing` never joined it."""

    rank: int
    collective: CollectiveRecord
    error: ErrorRecord
    missing: RankOutcome

    def sentence(self) -> str:
        return (
            f"rank {self.rank} gave up waiting in {self.collective} at {self.collective.call_site} "
            f"({self.error.headline()}); rank {self.missing.rank} never joined it: it {self.missing.ending()}"
        )


@dataclass(frozen=True, slots=True)
class Diverged(Cause):
    """Ranks issued different collectives on a group, and none refused, because all wrote at the same moment.

    `number` is the first collective that differs, with the record of each rank; 0 when it is no longer recorded.
    """

    group: str
    number: int = 0
    records: tuple[tuple[int, CollectiveRecord], ...] = ()

    def sentence(self) -> str:
        if not self.number:
            return (
                f"ranks disagree: they issued different collectives on the {self.group}, before the last ones recorded"
            )
        issued = "; ".join(f"rank {rank} issued {record.what} at {record.call_site}" for rank, record in self.records)
        return f"ranks disagree: collective #{self.number} of the {self.group} differs: {issued}"


@dataclass(frozen=True, slots=True)
class Stuck(Cause):
    """Rank `waiting` issued collective `record` on a group with rank `gone`, which ended the job without it.

    `last` is what `gone` issued last on that group; `failed` says whether it marked its result as failed.
    """

    waiting: int
    gone: int
    record: CollectiveRecord
    last: CollectiveRecord | None
    failed: bool

    def sentence(self) -> str:
        after = f"after #{self.last.number}" if self.last is not None else "without any collective of that group"
        return f"{self._wait()}; rank {self.gone} {'failed' if self.failed else 'returned'} {after}"

    def clause_of(self, ranks: Sequence[int]) -> str:
        return self._wait() if set(ranks) == {self.waiting} else ""

    def _wait(self) -> str:
        return f"rank {self.waiting} waits in {self.record} at {self.record.call_site}"


@dataclass(frozen=True, slots=True)
class Hung(Cause):
    """`ranks` did not end within `deadline` seconds; the ranks `behind` had issued the fewest collectives.

    `last` holds for every rank of the world what it issued last.
    """

    ranks: tuple[int, ...]
    deadline: float | None
    behind: tuple[int, ...]
    last: tuple[tuple[int, CollectiveRecord | None], ...]

    def sentence(self) -> str:
        return f"{self._lead()}: {'; '.join(_issued_last(*entry) for entry in self.last)}"

    def clause_of(self, ranks: Sequence[int]) -> str:
        if set(ranks) != set(self.ranks):
            return ""
        return f"{self._lead()}: {'; '.join(_issued_last(*entry) for entry in self.last if entry[0] in ranks)}"

    def _lead(self) -> str:
        limit = f" after {self.deadline:g} s" if self.deadline is not None else ""
        verb = "is" if len(self.behind) == 1 else "are"
        slower = f" ({rank_names(self.behind)} {verb} behind the others)" if self.behind else ""
        return f"{rank_names(self.ranks)} hung{limit}{slower}"


def _issued_last(rank: int, record: CollectiveRecord | None) -> str:
    return f"rank {rank} last issued {record}" if record is not None else f"rank {rank} issued no collective"


@dataclass(frozen=True, slots=True)
class Uneven(Cause):
    """All returned, but issued different numbers of collectives of a group; `counts` by rank, infinite where unknown."""

    group: str
    counts: tuple[tuple[int, float], ...]

    def sentence(self) -> str:
        counts = ", ".join(f"rank {rank}: {count:g}" for rank, count in self.counts)
        return f"ranks disagree: they issued different numbers of collectives on the {self.group} ({counts})"


@dataclass(frozen=True, slots=True)
class NotJoined(Cause):
    """`ranks` did not come into their new world within `seconds`."""

    ranks: tuple[int, ...]
    seconds: float

    def sentence(self) -> str:
        return f"{rank_names(self.ranks)} did not join the world within {self.seconds:g} s"


# Messages of gloo and the store when a peer has gone, or has not come in time. Both raise a bare RuntimeError or DistError, so
# only the text tells. It decides which error leads a report, never a verdict.
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
    # An exception after the first death is its echo, whatever its text.
    own = [r for r in raised if not _is_consequence(r) and not (died and r.finished_at > died[0].finished_at)]
    for rank in ranks:
        if rank.error is not None and rank.error.type_name == "CollectiveMismatch":
            return Refused(rank.rank, rank.error)
    if died and not own:
        alike = [rank for rank in died if rank.ending() == died[0].ending()]
        # Backends abort where sizes differ, on another rank than the one that swallowed the refusal.
        return first_difference(ranks, members) or _ended_badly(alike, ranks, members)
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


def different_collectives(ranks: Sequence[RankOutcome], members: Members) -> Diverged | None:
    """Return different collectives of ranks that issued equally many on a group, also if they are no longer recorded."""
    found = first_difference(ranks, members)
    for key, group in () if found else members.items():
        if len({_issued(rank, key) for rank in ranks if rank.rank in group}) == 1 and _digests_differ(
            ranks, key, group
        ):
            return Diverged(_label(ranks, key))
    return found


def _uneven_cause(ranks: Sequence[RankOutcome], members: Members) -> Cause | None:
    """All returned, but after different collectives: a rank issued one that no rank waited for."""
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
    """Return different collectives at the same place of a group that no rank refused, because all wrote at the same moment."""
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
