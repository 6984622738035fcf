"""What became of every rank? The full account of one job on one world, as data."""

from __future__ import annotations

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
    """Return the end of long output; all of it is in the record."""
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    return f"[the first {len(text) - _SHOWN_CHARACTERS} characters are left out]\n{text[-_SHOWN_CHARACTERS:]}"
