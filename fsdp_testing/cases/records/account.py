"""What one operation cost a rank besides its numbers: what it put on the wire, and what it left gathered.

Taken after every operation of a case, or made from the events of a trace; `checkers.overruns` judges it.
"""

from __future__ import annotations

from dataclasses import dataclass

GATHERS = ("all_gather",)
REDUCTIONS = ("reduce_scatter", "all_reduce", "all_to_all")
"""How names of collectives begin that gather parameters or reduce gradients."""

_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4}


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


def wire_bytes(dtype: str, numel: int) -> int:
    """Return the bytes of `numel` elements; of a dtype that nobody names each is one byte."""
    return numel * _BYTES.get(dtype, 1)
