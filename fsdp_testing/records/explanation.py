"""What is the least that shows a failure, and what does it say?"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_testing.records.case import Case
from fsdp_testing.records.portrait import Portrait


@dataclass(frozen=True, slots=True)
class Explanation:
    """A failure, reduced to the shortest schedule of operations that still shows it, with a sentence about it.

    Attributes:
        sentence: What happens, with numbers and bound.
        schedule: The operations that remain, one line each.
        case: The case with only these operations.
        left_out: How many operations of the original program are not needed.
        runs: How many programs were run to find out.
        seconds: Time that took.
        complete: Whether every single operation that remains is needed; else time or runs were used up.
        portrait: The shortest schedule as it ran, if the implementation can be traced.
    """

    sentence: str
    schedule: tuple[str, ...]
    case: Case
    left_out: int
    runs: int
    seconds: float
    complete: bool
    portrait: Portrait | None = None
