"""The full account of one job on one world, as data: the fate of every rank, its collectives, output and leaks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_testing.base.printable import printable
from fsdp_testing.ranks.ledger.reading import CollectiveRecord

if TYPE_CHECKING:
    from fsdp_testing.ranks.pool.cause import Cause

_SHOWN_CHARACTERS = 20_000
# Frames above a rank's function: ours, pytest's, those of its start, and of every import on the way.
_HERE = Path(__file__).parent
_MACHINERY = (
    f'"{_HERE}/',
    f'"{_HERE.parents[1] / "plugin"}/',
    "/_pytest/",
    "/pluggy/",
    "/torch/testing/_internal/",  # runs and compares for a user's test class
    '"<string>"',
    '"<frozen importlib',
)


UNSENT = "cannot be sent to the controller"
"""What the error of a call says whose result cannot be pickled."""


class Fate(StrEnum):
    """How one rank ended a job."""

    RETURNED = "returned"
    RAISED = "raised"
    DIED = "died"
    HUNG = "hung"
    STOPPED = "stopped"
    """Ended by the controller because another rank had failed."""


@dataclass(frozen=True, slots=True)
class Dirt:
    """One difference between a rank before and after a job.

    Attributes:
        kind: From a small vocabulary ("environment", "default dtype", "process group", "thread",
            "child process", "file descriptor", ...).
        what: The thing with its values before and after, as text.
        restored: True when the rank has its earlier state again; False when only a new process has.
    """

    kind: str
    what: str
    restored: bool

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}" + (" (put back)" if self.restored else "")


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
    holds one number for the whole sequence, equal on ranks that issued the same. `uncompared` groups did not fit in the
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
            silent = " (it sent no report)" if self.exit_code == 0 else ""
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


def left_behind(dirt: Iterable[tuple[int, Iterable[Dirt]]]) -> list[str]:
    """Return one line for each thing that ranks leaked, from (rank, thing); equal things once."""
    ranks_of: dict[str, list[int]] = {}
    for rank, entries in dirt:
        for entry in dict.fromkeys(map(str, entries)):
            ranks_of.setdefault(entry, []).append(rank)
    return [printable(f"{rank_names(ranks)} left {entry}") for entry, ranks in ranks_of.items()]


@dataclass(frozen=True, slots=True)
class WorldOutcome:
    """What every rank of a world did with one job.

    `diagnosis` is the one fact that explains the rest; None when every rank returned and they agree. `suspect` names an
    earlier job that left something running in this world, when a rank died before it began this one.
    """

    name: str
    size: int
    backend: str
    ranks: tuple[RankOutcome, ...]
    diagnosis: Cause | None = None
    seconds: float = 0.0
    suspect: str = ""

    @property
    def cause(self) -> str:
        """The diagnosis as a sentence; empty without one."""
        if self.diagnosis is None:
            return ""
        left = f" (something that {self.suspect} left running may be why)" if self.suspect else ""
        return self.diagnosis.sentence() + left

    @property
    def ok(self) -> bool:
        """Whether every rank returned and none marked its result as failed."""
        return self.diagnosis is None and self.all_good

    @property
    def all_good(self) -> bool:
        """Whether every rank is good, even if the ranks disagree."""
        return all(rank.good for rank in self.ranks)

    @property
    def values(self) -> list[Any]:
        """Results by rank; None where a rank did not return."""
        return [rank.value for rank in self.ranks]

    def describe(self) -> str:
        """Return the cause first, then every rank's account: fate, traceback or stack, last collectives, output."""
        lines = [self.cause or "every rank returned"]
        for rank in self.ranks:
            lines += ["", f"--- {rank.headline()}", *account_lines(rank)]
            for label, text in (("stdout", rank.stdout.rstrip()), ("stderr", rank.stderr.rstrip())):
                left_out = max(0, len(text) - _SHOWN_CHARACTERS)
                if text:
                    lines.append(f"{label} of rank {rank.rank}:")
                    # All of it is in the record.
                    lines += [f"[the first {left_out} characters are left out]"] if left_out else []
                    lines.append(text[left_out:])
        return printable("\n".join(lines))


def account_lines(rank: RankOutcome) -> list[str]:
    """Return error, last collectives and stack of a rank, without the frames above its function."""
    lines = _without(_MACHINERY, rank.error.traceback) if rank.error is not None else []
    if rank.fate is not Fate.RETURNED and rank.collectives:
        lines.append("last collectives:")
        lines += [f"  {record}  ({record.call_site})" for record in rank.collectives[-5:]]
    if rank.stack:
        lines += [f"stack of rank {rank.rank}:", *_without(_MACHINERY, rank.stack)]
    elif rank.fate in (Fate.HUNG, Fate.STOPPED):
        lines.append(f"no stack: rank {rank.rank} did not answer SIGUSR1 (its code may have taken or blocked it)")
    return lines


def _without(hidden: Sequence[str], trace: str) -> list[str]:
    """Return the lines of a traceback or stack without hidden frames and their source; all lines if no frame would be left."""
    shown: list[str] = []
    dropping = False
    for line in trace.rstrip().splitlines():
        if line.startswith("  File "):
            dropping = any(part in line for part in hidden)
        elif not line.startswith("    "):
            dropping = False
        if not dropping:
            shown.append(line)
    return shown if any(line.startswith("  File ") for line in shown) else trace.rstrip().splitlines()
