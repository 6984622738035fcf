"""What exactly diverged, where first, by how much, and how is it run again?"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_testing.records.case import Case
from fsdp_testing.records.explanation import Explanation


@dataclass(frozen=True, slots=True)
class Finding:
    """One divergence of one case.

    Attributes:
        kind: `diverged` (from the oracle), `disagreed` (ranks among themselves), `missing` (held by no rank),
            `uncoordinated` (ranks issued different collectives), `raised`, `died`, `hung`.
        quantity: What diverges first, such as `gradient of blocks.1.weight`.
        operation: Index of the first operation after which it diverges; -1 while wrapping.
        operation_text: That operation in one line.
        ranks: Ranks concerned.
        max_error: Largest absolute difference; None where a difference has no size (None-ness, dtype, exception).
        bound: The bound it exceeds.
        bound_derivation: How the bound came about.
        explanation: One sentence for people.
        detail: Tracebacks, the account of all ranks; may be long.
        case: The case, for the replay line.
        cause: Findings of one implementation with the same cause have one root cause; empty if nobody looked for it.
        shortest: The shortest schedule that shows it, on one finding of each cause.
    """

    kind: str
    quantity: str
    operation: int
    operation_text: str
    ranks: tuple[int, ...]
    explanation: str
    case: Case
    max_error: float | None = None
    bound: float | None = None
    bound_derivation: str = ""
    detail: str = ""
    cause: str = ""
    shortest: Explanation | None = None
