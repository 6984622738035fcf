"""Which operations may a training program consist of?

Every operation is data: what it does depends on its own fields and the case, never on its position, so that deleting
any other operation leaves its inputs unchanged. A later vocabulary adds a dataclass here and one handler in
`programs/`.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from dataclasses import dataclass, field
from typing import ClassVar

from fsdp_testing.errors import InvalidRecord
from fsdp_testing.records.document import register_union

FORWARD_MODES = ("train", "eval", "no_grad", "inference")


@dataclass(frozen=True, slots=True)
class Operation:
    """Base of all operations; `kind` is the tag in documents and reports."""

    kind: ClassVar[str] = "operation"
    needs: ClassVar[frozenset[str]] = frozenset()
    """Capabilities an implementation must claim for this operation, whatever its fields."""
    waits_for_reduction: ClassVar[bool] = False
    """It has no meaning while gradients of a `no_sync` micro-batch await reduction (`legality` knows some by name)."""
    reduces: ClassVar[bool] = False
    """It reduces gradients, those that awaited it included (`ForwardBackward` says so itself)."""

    def batches(self) -> tuple[Batch, ...]:
        """Returns the micro-batches that this operation runs."""
        return ()

    def required(self) -> frozenset[str]:
        """Returns the capabilities that this very operation needs."""
        return self.needs


@dataclass(frozen=True, slots=True)
class Batch:
    """The inputs of one micro-batch, different on every rank.

    Attributes:
        seed: Together with the rank it determines every number of the inputs and targets.
        rows: Number of rows, one entry for all ranks or one per rank (cycled); 0 is an empty batch.
        usage: Which optional branches of the model run, one mask for all ranks or one per rank (cycled); an empty tuple
            uses all. Models without branches ignore it.
        scale: Factor on the inputs, so that micro-batches can be told apart by magnitude.
    """

    seed: int
    rows: tuple[int, ...] = (4,)
    usage: tuple[tuple[bool, ...], ...] = ()
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not self.rows or any(rows < 0 for rows in self.rows):
            raise InvalidRecord(f"Batch.rows: expected one or more sizes >= 0, got {self.rows}. Give rows=(4,).")

    def rows_of(self, rank: int) -> int:
        """Returns the number of rows of `rank`."""
        return self.rows[rank % len(self.rows)]

    def usage_of(self, rank: int) -> tuple[bool, ...] | None:
        """Returns the usage mask of `rank`, or None if every branch runs."""
        return self.usage[rank % len(self.usage)] if self.usage else None

    def required(self) -> frozenset[str]:
        """Returns the capabilities that such inputs need."""
        uneven = {"uneven_batches"} if len(set(self.rows)) > 1 or 0 in self.rows else set()
        partial = {"unused_parameters"} if any(not all(mask) for mask in self.usage) else set()
        differ = {"unused_parameters_differ"} if len(set(self.usage)) > 1 else set()
        return frozenset(uneven | partial | differ)


@dataclass(frozen=True, slots=True)
class ForwardBackward(Operation):
    """Forward in training mode, loss, backward; inside `no_sync` the gradients stay local."""

    kind: ClassVar[str] = "forward_backward"
    batch: Batch
    no_sync: bool = False

    def batches(self) -> tuple[Batch, ...]:
        return (self.batch,)

    def required(self) -> frozenset[str]:
        return self.batch.required() | ({"no_sync"} if self.no_sync else frozenset())


@dataclass(frozen=True, slots=True)
class Forward(Operation):
    """Forward whose output is looked at and dropped: no backward follows."""

    kind: ClassVar[str] = "forward"
    needs: ClassVar[frozenset[str]] = frozenset({"forward_only"})
    batch: Batch
    mode: str = "train"

    def __post_init__(self) -> None:
        if self.mode not in FORWARD_MODES:
            raise InvalidRecord(
                f"Forward.mode: expected one of {FORWARD_MODES}, got {self.mode!r}. Choose one of them."
            )

    def batches(self) -> tuple[Batch, ...]:
        return (self.batch,)

    def required(self) -> frozenset[str]:
        inference = {"inference_mode"} if self.mode == "inference" else frozenset()
        return Forward.needs | self.batch.required() | inference


@dataclass(frozen=True, slots=True)
class ZeroGrad(Operation):
    """Clears the gradients, by None or by zeros."""

    kind: ClassVar[str] = "zero_grad"
    set_to_none: bool = True


@dataclass(frozen=True, slots=True)
class Step(Operation):
    """One optimizer step."""

    kind: ClassVar[str] = "step"


@dataclass(frozen=True, slots=True)
class BuildOptimizer(Operation):
    """Builds the case's optimizer here instead of right after wrapping; a second one starts from empty state."""

    kind: ClassVar[str] = "build_optimizer"
    needs: ClassVar[frozenset[str]] = frozenset({"late_optimizer"})


@dataclass(frozen=True, slots=True)
class SetLr(Operation):
    """Sets the learning rate of every parameter group."""

    kind: ClassVar[str] = "set_lr"
    lr: float


@dataclass(frozen=True, slots=True)
class Freeze(Operation):
    """Sets `requires_grad=False` on the parameters whose name matches one of the patterns (fnmatch)."""

    kind: ClassVar[str] = "freeze"
    needs: ClassVar[frozenset[str]] = frozenset({"frozen_parameters", "thawed_parameters"})
    patterns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Thaw(Operation):
    """Sets `requires_grad=True` on the parameters whose name matches one of the patterns (fnmatch)."""

    kind: ClassVar[str] = "thaw"
    needs: ClassVar[frozenset[str]] = frozenset({"thawed_parameters"})
    patterns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Clip(Operation):
    """Clips the gradients by their total norm; `norm_type` is any p >= 1, infinity included."""

    kind: ClassVar[str] = "clip"
    needs: ClassVar[frozenset[str]] = frozenset({"clip_grad_norm"})
    max_norm: float
    norm_type: float = 2.0


@dataclass(frozen=True, slots=True)
class EditFullParameters(Operation):
    """Gathers the full parameters, multiplies those matching a pattern in place, and releases them."""

    kind: ClassVar[str] = "edit_full_parameters"
    needs: ClassVar[frozenset[str]] = frozenset({"summon_writeback"})
    patterns: tuple[str, ...]
    factor: float
    writeback: bool = True


@dataclass(frozen=True, slots=True)
class Observe(Operation):
    """A marked point: every rank reports its local pieces here, without communication or change of state."""

    kind: ClassVar[str] = "observe"
    label: str = ""


def _kinds() -> dict[str, type[Operation]]:
    members = inspect.getmembers(sys.modules[__name__], inspect.isclass)
    return {cls.kind: cls for _, cls in members if issubclass(cls, Operation) and cls is not Operation}


OPERATIONS: dict[str, type[Operation]] = _kinds()
"""Every kind of operation by its tag."""

register_union(Operation, OPERATIONS.get)


@dataclass(frozen=True, slots=True)
class OperationText:
    """How an operation is told in one line of a report."""

    index: int
    operation: Operation
    skip: frozenset[str] = field(default_factory=frozenset)

    def __str__(self) -> str:
        shown = []
        for item in dataclasses.fields(self.operation):
            value = getattr(self.operation, item.name)
            if isinstance(value, Batch):
                shown.append(f"batch {value.seed}")
            elif value != item.default:
                shown.append(f"{item.name}={value!r}")
        return f"operation {self.index} {self.operation.kind}({', '.join(shown)})"
