"""Decides which operations of a program run and which are void: one function for all callers.

A case is legal whatever its program: an operation that documentation forbids in its place, or whose object is missing, is
*void* and is not run. So deleting any operation leaves a legal case, which shrinking needs. Everything that documentation
does not forbid is run.

- While gradients of a `no_sync` micro-batch await reduction, an operation with `Operation.forbidden_while_pending` (a link)
  is void. Everything else runs, including clearing, freezing, editing, saving and moving. Each implementation keeps the
  parts of a pending gradient where it likes, so they are compared only after the reduction.
- Before the program has built the optimizer there is none to step or to change the learning rate of (`needs_optimizer`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fsdp_testing.cases.operations import Operation
from fsdp_testing.cases.records.case import Case


@dataclass(frozen=True, slots=True)
class PlannedOperation:
    """An operation in its place.

    Attributes:
        index: Its position in the case's program; `len(program)` for the observation that ends every case.
        operation: The operation.
        void: Why it is not run; the empty string if it runs.
        pending: Whether gradients await reduction after it, so that gradients are not compared there.
    """

    index: int
    operation: Operation
    void: str
    pending: bool


def builds_late(case: Case) -> bool:
    """Whether the program itself builds the optimizer; otherwise it is built right after wrapping."""
    return any(operation.builds_optimizer for operation in case.program)


def plan(case: Case) -> Iterator[PlannedOperation]:
    """Yield the operations of `case` in order, each with its standing."""
    pending = False
    built = not builds_late(case)
    for index, operation in enumerate(case.program):
        void = ""
        if pending and operation.forbidden_while_pending:
            void = f"gradients of a no_sync micro-batch await reduction ({operation.forbidden_while_pending})"
        elif not built and operation.needs_optimizer:
            void = "the optimizer is not built yet"
        else:
            built = built or operation.builds_optimizer
            pending = operation.pending_after(pending)
        yield PlannedOperation(index, operation, void, pending)
