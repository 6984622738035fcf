"""Which operations of a program take part and which are void: one function decides for everyone.

A case is legal whatever its program: an operation that documentation forbids where it stands, or whose object is not
there, is *void*, and nobody runs it. So deleting any operation leaves a legal case, which is what shrinking needs. Whatever
nobody forbids is asked.

- While gradients of a `no_sync` micro-batch await reduction, what says so (`Operation.forbidden_while_pending`, with the
  link) is void. Everything else runs, clearing, freezing, editing, saving and moving included; each implementation keeps
  the parts of a pending gradient where it likes, so none of them is compared until they are reduced.
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
        void: Why nobody runs it; the empty string if it runs.
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


def void_operations(case: Case) -> dict[int, str]:
    """Return the index of every void operation with the reason."""
    return {planned.index: planned.void for planned in plan(case) if planned.void}
