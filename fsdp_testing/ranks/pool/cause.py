"""The causes that a world's outcome can have, as data; each makes its sentence, and nothing parses one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_testing.ranks.pool.outcome import CollectiveRecord, ErrorRecord, Fate, RankOutcome, rank_names


@dataclass(frozen=True, slots=True)
class Cause:
    """One fact that explains the rest; subclasses are the kinds."""

    def sentence(self) -> str:
        """Return the sentence that leads an account."""
        raise NotImplementedError

    def clause_of(self, ranks: Sequence[int]) -> str:
        """Return what the sentence says of `ranks`, which had not ended; empty if it is not about exactly these."""
        del ranks
        return ""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """Ranks that had not ended when another one failed.

    `collective` is what the first of them waited in: a peer never joined it. None when none is known to wait.
    """

    ranks: tuple[int, ...]
    collective: CollectiveRecord | None

    def clause(self) -> str:
        """Return the clause that follows the cause."""
        how = f"waited in {self.collective}" if self.collective is not None else "had not finished"
        return f"{rank_names(self.ranks)} {how}"


@dataclass(frozen=True, slots=True)
class EndedBadly(Cause):
    """`ranks` died, raised or returned a failure alike, and `first` of them first.

    `everyone` when all of several raised; `unfinished` are the others that had not ended by then.
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
    """`rank` refused a collective before it began, because a peer had issued another one; `error` says which."""

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
    """Ranks issued different collectives on a group, and nobody refused: all wrote at one moment.

    `number` is the first place where they differ, with the record of each rank there; 0 when it is no longer recorded.
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
    """`ranks` did not end within `deadline` seconds; those `behind` had issued the fewest collectives of them.

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
    """All returned, but not after equally many collectives of a group; `counts` by rank, infinite where unknown."""

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
        return f"{rank_names(self.ranks)} did not come into the world within {self.seconds:g} s"
