"""What became of every rank? The full account of one job on one world, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_testing.pool.cause import Cause
from fsdp_testing.pool.rank_outcome import Fate, RankOutcome

_SHOWN_CHARACTERS = 20_000


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
        return self.diagnosis is None and all(rank.good for rank in self.ranks)

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
        return "\n".join(lines)


def account_lines(rank: RankOutcome, hidden: Sequence[str] = ()) -> list[str]:
    """Return error, last collectives and stack of a rank, without the frames of files whose names hold a part in `hidden`."""
    lines = _without(hidden, rank.error.traceback) if rank.error is not None else []
    if rank.fate is not Fate.RETURNED and rank.collectives:
        lines.append("last collectives:")
        lines += [f"  {record}  ({record.call_site})" for record in rank.collectives[-5:]]
    if rank.stack:
        lines += [f"stack of rank {rank.rank}:", *_without(hidden, rank.stack)]
    elif rank.fate in (Fate.HUNG, Fate.STOPPED):
        lines.append(f"no stack: rank {rank.rank} did not answer SIGUSR1 (its code may have taken or blocked it)")
    return lines


def _without(hidden: Sequence[str], trace: str) -> list[str]:
    """Return the lines of a traceback or stack; with a frame go its lines of source."""
    kept: list[str] = []
    dropping = False
    for line in trace.rstrip().splitlines():
        if line.startswith("  File "):
            dropping = any(part in line for part in hidden)
        elif not line.startswith("    "):
            dropping = False
        if not dropping:
            kept.append(line)
    return kept
