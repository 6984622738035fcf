"""Operations beyond the plain training loop: saving and loading, interruptions, several forwards, manual unsharding.

Registered beside those of `operation`; each has a handler in `programs.handlers_state`, for engine and oracle.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from typing import ClassVar

from fsdp_testing.errors import InvalidRecord
from fsdp_testing.records.operation import OPERATIONS, Batch, Operation

FORMS = ("full", "sharded", "local")
PLACES = ("step", "no_sync", "summon")


@dataclass(frozen=True, slots=True)
class SeveralForwards(Operation):
    """Several forwards, then as many backwards, in the order of the forwards or in the reverse one."""

    kind: ClassVar[str] = "several_forwards"
    needs: ClassVar[frozenset[str]] = frozenset({"several_forwards", "accumulate_without_no_sync"})
    reduces: ClassVar[bool] = True
    micro_batches: tuple[Batch, ...]
    reverse: bool = False

    def __post_init__(self) -> None:
        if not self.micro_batches:
            raise InvalidRecord("SeveralForwards.micro_batches: expected at least one, got none. Give a batch.")

    def batches(self) -> tuple[Batch, ...]:
        return self.micro_batches

    def required(self) -> frozenset[str]:
        return SeveralForwards.needs.union(*(batch.required() for batch in self.micro_batches))


@dataclass(frozen=True, slots=True)
class Reload(Operation):
    """Saves model and optimizer, builds everything anew from other values, loads, and goes on with the new ones.

    Gradients are gone afterwards; a new optimizer has an empty state and the case's learning rate.

    Attributes:
        form: `full`, `sharded` or `local` model state.
        optimizer: Optimizer state is saved and loaded too, if there is an optimizer.
        units: Inner units of the new model; None keeps the plan. Another plan needs the full form.
        through: Between saving and loading one process without sharding loads what was saved, trains a step on these
            inputs (those of rank 0), and saves: the state comes from a world of another size. Needs the full form.
    """

    kind: ClassVar[str] = "reload"
    waits_for_reduction: ClassVar[bool] = True
    form: str = "full"
    optimizer: bool = True
    units: tuple[str, ...] | None = None
    through: Batch | None = None

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise InvalidRecord(f"Reload.form: expected one of {FORMS}, got {self.form!r}. Choose one of them.")
        if self.units is not None and self.form != "full":
            raise InvalidRecord("Reload.units: expected None with the sharded form, got a plan. Save the full state.")
        if self.through is not None and self.form != "full":
            raise InvalidRecord(
                f"Reload.through: expected None with the {self.form} form, got inputs. Save the full state."
            )

    def batches(self) -> tuple[Batch, ...]:
        return () if self.through is None else (self.through,)

    def required(self) -> frozenset[str]:
        tags = {f"{self.form}_state_dict"} | ({"optim_state"} if self.optimizer else set())
        return frozenset(tags | ({"nested_wrapping"} if self.units else set()))


@dataclass(frozen=True, slots=True)
class Interrupt(Operation):
    """The user's own code raises on every rank, in a forward or in its backward; then gradients are cleared.

    Attributes:
        batch: Inputs; every rank uses the same branches, else the ranks would part by the user's own doing.
        place: Which module without children raises, counted in module order and wrapped around.
        backward: It raises when the gradient of its output is known, instead of before its forward.
        where: In an ordinary `step`, in one inside `no_sync`, or in an open `summon` (then no forward runs at all).
    """

    kind: ClassVar[str] = "interrupt"
    needs: ClassVar[frozenset[str]] = frozenset({"exception_recovery"})
    waits_for_reduction: ClassVar[bool] = True
    batch: Batch
    place: int = 0
    backward: bool = False
    where: str = "step"

    def __post_init__(self) -> None:
        if self.where not in PLACES:
            raise InvalidRecord(f"Interrupt.where: expected one of {PLACES}, got {self.where!r}. Choose one of them.")

    def batches(self) -> tuple[Batch, ...]:
        return (self.batch,)

    def required(self) -> frozenset[str]:
        inside = {"no_sync": {"no_sync"}, "summon": {"summon_writeback"}}.get(self.where, set())
        return Interrupt.needs | self.batch.required() | inside


@dataclass(frozen=True, slots=True)
class UnshardFirst(Operation):
    """Gathers units by hand, then does a micro-batch.

    Attributes:
        batch: Inputs.
        units: FQNs of the units; the root is the empty string.
        reshard: They are released again before the micro-batch.
    """

    kind: ClassVar[str] = "unshard_first"
    needs: ClassVar[frozenset[str]] = frozenset({"explicit_unshard"})
    reduces: ClassVar[bool] = True
    batch: Batch
    units: tuple[str, ...] = ("",)
    reshard: bool = False

    def batches(self) -> tuple[Batch, ...]:
        return (self.batch,)

    def required(self) -> frozenset[str]:
        return UnshardFirst.needs | self.batch.required()


@dataclass(frozen=True, slots=True)
class AssignData(Operation):
    """Gives parameters new storage (`p.data = ...`) with values multiplied by a factor; then a forward without gradient.

    An implementation may notice the new storage only when it next uses the parameters, so a forward belongs to it.
    """

    kind: ClassVar[str] = "assign_data"
    needs: ClassVar[frozenset[str]] = frozenset({"data_assignment", "forward_only"})
    waits_for_reduction: ClassVar[bool] = True
    patterns: tuple[str, ...]
    factor: float
    batch: Batch

    def batches(self) -> tuple[Batch, ...]:
        return (self.batch,)

    def required(self) -> frozenset[str]:
        return AssignData.needs | self.batch.required()


@dataclass(frozen=True, slots=True)
class ReplaceParameters(Operation):
    """Gathers the full parameters, puts other ones with values multiplied by a factor in their place, and releases them.

    Shared parameters are left out: replaced in one of their places only they would be two.
    """

    kind: ClassVar[str] = "replace_parameters"
    needs: ClassVar[frozenset[str]] = frozenset({"summon_writeback", "parameter_replacement"})
    waits_for_reduction: ClassVar[bool] = True
    patterns: tuple[str, ...]
    factor: float


@dataclass(frozen=True, slots=True)
class Move(Operation):
    """`module.to` the device where it is already, which touches every parameter and must change none.

    Attributes:
        dtype: `module.to` this dtype as well, for good: inputs have it from here on. Gradients and the optimizer are
            not carried over, so it comes before both.
    """

    kind: ClassVar[str] = "move"
    waits_for_reduction: ClassVar[bool] = True
    dtype: str | None = None

    def required(self) -> frozenset[str]:
        return frozenset({"dtype_cast"} if self.dtype else ())


OPERATIONS.update(
    {
        cls.kind: cls
        for _, cls in inspect.getmembers(sys.modules[__name__], inspect.isclass)
        if cls.__module__ == __name__ and issubclass(cls, Operation)
    }
)
