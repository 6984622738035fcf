"""What did one operation cost a rank besides its numbers: what it put on the wire, and what it left gathered?

Taken by the fuzzer after every operation of a case; `checkers.promises` judges it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OperationAccount:
    """One operation on one rank.

    Attributes:
        index: Position in the program; -1 for wrapping.
        backward: Whether a backward ran in it.
        gathered: Units that were gathered, once for each time.
        held: Units whose full parameters are in memory when it is over, each with their bytes (0: not known).
        gather_bytes: Size of the result of each all-gather.
        reduction_bytes: Size of each reduction's input.
    """

    index: int
    backward: bool = False
    gathered: tuple[str, ...] = ()
    held: tuple[tuple[str, int], ...] = ()
    gather_bytes: tuple[int, ...] = ()
    reduction_bytes: tuple[int, ...] = ()
