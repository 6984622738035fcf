"""When are two failures the same? When they are of one kind, show in one sort of quantity, and after one operation.

The signature is what shrinking must keep. Numbers, names of parameters and ranks are left out of it: they change while
a case shrinks although the defect stays.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from fsdp_testing.checkers.divergence import Divergence
from fsdp_testing.records import Case, RaisedError

MESSAGE_LENGTH = 90


class Signature(NamedTuple):
    """What a failure looks like.

    Attributes:
        kind: `diverged`, `disagreed`, `missing`, `raised`, `one_raised` (others went on or waited), `desynchronised`
            (ranks issued different collectives), `kept` (full parameters), `excess` (of communication), `died`, `hung`,
            `leaked`.
        quantity: Sort of quantity, or type and message of an exception.
        operation: Kind of the operation after which it shows; empty where none is known.
    """

    kind: str
    quantity: str = ""
    operation: str = ""

    def __str__(self) -> str:
        where = f" in {self.operation}" if self.operation else ""
        return f"{self.kind} {self.quantity}{where}".strip()


def operation_kind(case: Case, index: int) -> str:
    """Returns the kind of operation `index`; building, and the end of the program, have names of their own."""
    if index < 0:
        return "build"
    return case.program[index].kind if index < len(case.program) else "end"


def of_divergence(case: Case, divergence: Divergence) -> Signature:
    """Returns the signature of a divergence."""
    quantity = divergence.quantity
    sort = quantity.kind
    operation = operation_kind(case, divergence.index)
    if sort == "result":
        sort = "total_norm" if quantity.name == "total_norm" else "output"
        # Which kind of forward shows wrong weights first says nothing about them.
        operation = operation if sort == "total_norm" else "forward"
    elif sort == "optimizer":
        sort = f"optimizer {quantity.part}"
    if divergence.max_error is None:
        # Of what kind the difference is: None-ness, dtype, a flag.
        sort += f" {_shape(divergence.sentence.split(',')[0])}"
    return Signature(divergence.kind, sort, operation)


def of_error(case: Case, error: RaisedError, *, everyone: bool) -> Signature:
    """Returns the signature of an exception."""
    first = next(iter(error.message.strip().splitlines()), "")
    text = f"{error.type_name}: {_shape(first)}"
    return Signature("raised" if everyone else "one_raised", text, operation_kind(case, error.index))


def _shape(message: str) -> str:
    """A message without what varies from case to case: numbers, names, addresses."""
    text = re.sub(r"0x[0-9a-f]+", "#", message)
    text = re.sub(r"\b(ranks?) \d+((, | and )\d+)*", r"\1 #", text)
    text = re.sub(r"'[^']*'|\"[^\"]*\"|\[[^\]]*\]|\([^)]*\)", "_", text)
    text = re.sub(r"\b[a-z]+(\.[a-z]+)*\.(weight|bias)\b", "_", text)
    text = re.sub(r"-?\d+(\.\d+)?(e-?\d+)?", "#", text)
    return re.sub(r"\s+", " ", text).strip()[:MESSAGE_LENGTH]
