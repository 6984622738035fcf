"""The operations of a training program: one class for each, with everything known about it.

A new operation is a class in one of these files, an entry in `ALL`, and a test. Standard library at import: records and
reports need no torch.
"""

from collections.abc import Iterable

from fsdp_testing.cases.operations.full_parameters import (
    AssignData,
    EditFullParameters,
    Freeze,
    Move,
    ReplaceParameters,
    Thaw,
    UnshardFirst,
)
from fsdp_testing.cases.operations.micro_batches import Forward, ForwardBackward, LocalMicroBatches, SeveralForwards
from fsdp_testing.cases.operations.operation import Batch, Operation, missing_facets
from fsdp_testing.cases.operations.optimizing import BuildOptimizer, Clip, EditGradients, Observe, SetLr, Step, ZeroGrad
from fsdp_testing.cases.operations.reloading import Reload, TrainElsewhere
from fsdp_testing.cases.operations.saving import Restore, Save
from fsdp_testing.cases.operations.unusual_backwards import Interrupt, UnusualBackward
from fsdp_testing.errors import InvalidRecord

ALL: tuple[type[Operation], ...] = (
    ForwardBackward, Step, ZeroGrad, Forward, SetLr, Freeze, Thaw, Clip, EditFullParameters, Observe, BuildOptimizer,
    Move, SeveralForwards, Reload, Interrupt, UnshardFirst, AssignData, ReplaceParameters,
    LocalMicroBatches, Save, UnusualBackward, TrainElsewhere, EditGradients, Restore,
)  # fmt: skip
"""Every operation, the simplest first: shrinking moves a drawn program towards the front."""


def by_kind(operations: Iterable[type[Operation]]) -> dict[str, type[Operation]]:
    """Return operations by their tag.

    Raises:
        InvalidRecord: Operations lack a facet, or share a tag; all are listed.
    """
    found: dict[str, type[Operation]] = {}
    problems = []
    for operation in operations:
        name, missing = operation.__name__, missing_facets(operation)
        if missing:
            problems.append(f"{name} lacks {', '.join(missing)}")
        if found.setdefault(operation.kind, operation) is not operation:
            problems.append(f"{name} has the kind {operation.kind!r} of {found[operation.kind].__name__}")
    if problems:
        raise InvalidRecord(
            f"operations: expected every facet of every operation under a unique kind, got {'; '.join(problems)}. "
            "Define in the class what Operation documents."
        )
    return found


OPERATIONS = by_kind(ALL)
"""Every kind of operation by its tag."""

__all__ = [
    "ALL", "OPERATIONS", "AssignData", "Batch", "BuildOptimizer", "Clip", "EditFullParameters", "EditGradients", "Forward",
    "ForwardBackward", "Freeze", "Interrupt", "LocalMicroBatches", "Move", "Observe", "Operation", "Reload",
    "ReplaceParameters", "Restore", "Save", "SetLr", "SeveralForwards", "Step",  "Thaw", "TrainElsewhere", "UnshardFirst",
    "UnusualBackward", "ZeroGrad", "by_kind",
]  # fmt: skip
