"""What became of every rank? The full account of one job on one world, as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from fsdp_testing.records.dirt import Dirt

_SHOWN_CHARACTERS = 20_000


class Fate(StrEnum):
    """How one rank ended a job."""

    RETURNED = "returned"
    RAISED = "raised"
    DIED = "died"
    HUNG = "hung"
    STOPPED = "stopped"
    """Ended by the controller because another rank had failed."""


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """An exception of a rank, as text: it may be of a type that the controller cannot import."""

    type_name: str
    message: str
    traceback: str

    def headline(self) -> str:
        """First line of the message with the type's name."""
        first = self.message.strip().splitlines()
        return f"{self.type_name}: {first[0]}" if first else self.type_name


@dataclass(frozen=True, slots=True)
class CollectiveRecord:
    """One collective as a rank's ledger holds it.

    `number` counts the collectives of its group in this job, from 1. `group` is the readable name of the group and
    `group_key` its identity on all ranks. `moment_ns` is the system-wide monotonic clock. Ranks that issue records of
    equal `signature` together are in order, though shapes in `what` may differ.
    """

    number: int
    group: str
    group_key: int
    what: str
    call_site: str
    moment_ns: int = 0
    signature: int = 0

    def __str__(self) -> str:
        where = "" if self.group == "default group" else f" on {self.group}"
        head, space, shape = self.what.partition(" ")
        return f"{head} #{self.number}{space}{shape}{where}"


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """What one rank did with a job.

    `stdout` and `stderr` hold everything written on the rank's descriptors 1 and 2 during the job, C++ included.
    `collectives` are the last ones issued, oldest first; per group key, `issued` counts all of them and `digests`
    holds one number for the whole sequence, equal on ranks that issued the same. `uncompared` groups found no room in the
    ledger. `began` is False for a rank that never reached the call; `finished_at` is on the system's monotonic clock.
    """

    rank: int
    fate: Fate
    value: Any = None
    failed: bool = False
    error: ErrorRecord | None = None
    exit_code: int | None = None
    signal_name: str | None = None
    stack: str = ""
    collectives: tuple[CollectiveRecord, ...] = ()
    issued: dict[int, int] = field(default_factory=dict)
    digests: dict[int, int] = field(default_factory=dict)
    dirt: tuple[Dirt, ...] = ()
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0
    finished_at: float = 0.0
    began: bool = True
    uncompared: int = 0

    @property
    def good(self) -> bool:
        """True when the rank returned and did not mark its result as failed."""
        return self.fate is Fate.RETURNED and not self.failed

    def last_collective(self) -> CollectiveRecord | None:
        """The collective issued last, if the rank issued any."""
        return self.collectives[-1] if self.collectives else None

    def headline(self) -> str:
        """One clause that tells this rank's fate."""
        name = f"rank {self.rank}"
        if self.fate is Fate.DIED:
            when = "" if self.began else " before it began this call"
            if self.signal_name:
                return f"{name} died by {self.signal_name}{when}"
            silent = " (it left without a report)" if self.exit_code == 0 else ""
            return f"{name} died with exit code {self.exit_code}{silent}{when}"
        if self.fate is Fate.RAISED and self.error is not None:
            return f"{name} raised {self.error.headline()}"
        last = self.last_collective()
        if self.fate is Fate.RETURNED:
            how = "returned" if not self.failed else "failed"
            return f"{name} {how} after {last}" if last else f"{name} {how}"
        verb = "hung" if self.fate is Fate.HUNG else "was stopped"
        return f"{name} {verb} in or after {last}" if last else f"{name} {verb} before any collective"


@dataclass(frozen=True, slots=True)
class WorldOutcome:
    """What every rank of a world did with one job; `cause` is the one fact that explains the rest."""

    name: str
    size: int
    backend: str
    ranks: tuple[RankOutcome, ...]
    cause: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """True when every rank returned and none marked its result as failed."""
        return not self.cause and all(rank.good for rank in self.ranks)

    @property
    def values(self) -> list[Any]:
        """Results by rank; None where a rank did not return."""
        return [rank.value for rank in self.ranks]

    def describe(self) -> str:
        """Cause first, then every rank's account: fate, traceback or stack, last collectives, output."""
        lines = [self.cause or "every rank returned"]
        for rank in self.ranks:
            lines.append("")
            lines.append(f"--- {rank.headline()}")
            lines.extend(_account(rank))
        return "\n".join(lines)


def _account(rank: RankOutcome) -> list[str]:
    lines: list[str] = []
    if rank.error is not None:
        lines.append(rank.error.traceback.rstrip())
    if rank.fate in (Fate.HUNG, Fate.STOPPED, Fate.DIED) and rank.collectives:
        lines.append("last collectives:")
        lines.extend(f"  {record}  ({record.call_site})" for record in rank.collectives[-5:])
    if rank.stack:
        lines.append(f"stack of rank {rank.rank}:")
        lines.append(rank.stack.rstrip())
    elif rank.fate in (Fate.HUNG, Fate.STOPPED):
        lines.append(f"no stack: rank {rank.rank} did not answer SIGUSR1 (its code may have taken or blocked it)")
    for label, text in (("stdout", rank.stdout), ("stderr", rank.stderr)):
        if text.strip():
            lines.append(f"{label} of rank {rank.rank}:")
            lines.append(_shortened(text.rstrip()))
    return lines


def _shortened(text: str) -> str:
    """The end of long output; all of it is in the record."""
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    return f"[the first {len(text) - _SHOWN_CHARACTERS} characters are left out]\n{text[-_SHOWN_CHARACTERS:]}"
