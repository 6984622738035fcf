"""What did one rank do with a job? Its fate, its collectives and what it wrote, as data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from fsdp_testing.ledger.reading import CollectiveRecord
from fsdp_testing.records.dirt import Dirt


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
        """Return the first line of the message with the type's name."""
        first = self.message.strip().splitlines()
        return f"{self.type_name}: {first[0]}" if first else self.type_name


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
        """Whether the rank returned and did not mark its result as failed."""
        return self.fate is Fate.RETURNED and not self.failed

    def last_collective(self) -> CollectiveRecord | None:
        """Return the collective issued last, or None if the rank issued none."""
        return self.collectives[-1] if self.collectives else None

    def headline(self) -> str:
        """Say in one clause how this rank ended."""
        return f"rank {self.rank} {self.ending()}"

    def ending(self) -> str:
        """Say how this rank ended, without its name."""
        if self.fate is Fate.DIED:
            when = "" if self.began else " before it began this call"
            if self.signal_name:
                return f"died by {self.signal_name}{when}"
            silent = " (it left without a report)" if self.exit_code == 0 else ""
            return f"died with exit code {self.exit_code}{silent}{when}"
        if self.fate is Fate.RAISED and self.error is not None:
            return f"raised {self.error.headline()}"
        last = self.last_collective()
        if self.fate is Fate.RETURNED:
            how = "returned" if not self.failed else "failed"
            return f"{how} after {last}" if last else how
        verb = "hung" if self.fate is Fate.HUNG else "was stopped"
        return f"{verb} in or after {last}" if last else f"{verb} before any collective"


def rank_names(ranks: Iterable[int]) -> str:
    """Return ranks as words: "rank 1", "ranks 0, 2", "ranks 0 to 7" for a run of more than four."""
    numbers = sorted(ranks)
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > 4 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"ranks {numbers[0]} to {numbers[-1]}"
    return "ranks " + ", ".join(map(str, numbers))
