"""How much may finding an explanation cost?"""

from __future__ import annotations

import time

SECONDS = 10.0
"""For all failures of one implementation."""

RUNS_OF_ONE = 40
"""Programs run for one failure."""


class Budget:
    """Runs and seconds that are left.

    Args:
        seconds: From now on.
        runs: Programs that may be run.
    """

    def __init__(self, seconds: float, runs: int = RUNS_OF_ONE) -> None:
        self._start = time.monotonic()
        self._deadline = self._start + seconds
        self._allowed = runs
        self.runs = 0

    def part(self, runs: int = RUNS_OF_ONE) -> Budget:
        """A budget for one failure out of this one: the time that is left, and runs of its own."""
        return Budget(max(self._deadline - time.monotonic(), 0.0), runs)

    def spend(self) -> bool:
        """Take one run; False when nothing is left."""
        if self.exhausted:
            return False
        self.runs += 1
        return True

    @property
    def exhausted(self) -> bool:
        """Whether time or runs are used up."""
        return self.runs >= self._allowed or time.monotonic() >= self._deadline

    @property
    def seconds(self) -> float:
        """Time since it began."""
        return time.monotonic() - self._start
