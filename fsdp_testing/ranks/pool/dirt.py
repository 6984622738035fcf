"""What did one job leave behind in a rank? A record for each thing, named so that a reader can find its maker."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Dirt:
    """One difference between a rank before and after a job.

    Attributes:
        kind: What sort of thing, from a small vocabulary ("environment", "default dtype", "process group", "thread",
            "child process", "file descriptor", ...).
        what: The thing itself with its values before and after, as text.
        restored: True when the rank is again as it was; False when only a new process is.
    """

    kind: str
    what: str
    restored: bool

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}" + (" (put back)" if self.restored else "")
