"""Operations of a user on parameters between micro-batches: gather, edit, replace, give new storage, freeze, thaw, move, cast."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

from fsdp_testing.base.document import ADDED_LATER
from fsdp_testing.cases.operations import user_code
from fsdp_testing.cases.operations.micro_batches import Forward, ForwardBackward, ForwardPass, TrainingPass
from fsdp_testing.cases.operations.operation import Batch, OfPatterns, Operation, matching

if TYPE_CHECKING:
    import torch

    from fsdp_testing.cases.drawing.normal_form import ProgramContext
    from fsdp_testing.cases.drawing.operation_drawer import OperationDrawer
    from fsdp_testing.oracle.execute import RankProgram, Values
    from fsdp_testing.oracle.replay import Replay, Results


_FACTORS = (0.5, -1.0, 1.25)


def _shown(full: Mapping[str, torch.Tensor]) -> Values:
    """Return the values of every parameter that a rank saw before the edit: a write-back takes only the rank's own span."""
    return {f"full.{fqn}": parameter.detach().clone() for fqn, parameter in full.items()}


def _shown_to_each_rank(replay: Replay) -> Results:
    values: Results = {}
    for rank in range(replay.size):
        for fqn, parameter in replay.parameters.items():
            values |= replay.result(rank, f"full.{fqn}", parameter)
    return values


@dataclass(frozen=True, slots=True)
class EditFullParameters(OfPatterns):
    """Gathers the full parameters, multiplies those matching a pattern in place, and releases them."""

    kind = "edit_full_parameters"
    needs = frozenset({"summon_writeback"})
    passes = 1
    features = {"op.edit": ("summon_writeback",)}
    writes_parameters = True
    factor: float
    writeback: bool = True

    @classmethod
    def draw(cls, drawer: OperationDrawer) -> EditFullParameters:
        writeback = not drawer.choices.chance(4)
        return cls(drawer.patterns(), drawer.choices.pick(_FACTORS), writeback)

    def changes_ignored(self) -> tuple[str, ...]:
        return () if self.writeback else self.patterns

    def token(self) -> str:
        return self.kind if self.writeback else f"{self.kind}[read_only]"

    def script_lines(self, name: str) -> list[str] | None:
        return [f"one.edit({self.patterns!r}, {self.factor!r}, {self.writeback})"]

    def run(self, program: RankProgram) -> Values:
        with program.adapter.full_parameters(program.model, writeback=self.writeback) as full:
            shown = _shown(full)
            user_code.scale([parameter for _, parameter in matching(full.items(), self.patterns)], self.factor)
        return shown

    def replay(self, replay: Replay) -> Results:
        shown = _shown_to_each_rank(replay)
        if self.writeback:
            replay.scale(self.patterns, self.factor)
        return shown


@dataclass(frozen=True, slots=True)
class ReplaceParameters(OfPatterns):
    """Gathers the full parameters, replaces them by new ones with values multiplied by a factor, and releases them.

    Shared parameters are left out: replaced in only one place, they would become two.

    Attributes:
        patterns: Patterns of the parameters' names.
        factor: The factor for their values.
        storage: The parameters stay, and get new storage.
    """

    kind = "replace_parameters"
    needs = frozenset({"summon_writeback"})
    passes = 1
    features = {
        "op.replace": ("summon_writeback", "parameter_replacement"),
        "op.replace_storage": ("summon_writeback", "storage_replacement"),
    }
    writes_parameters = True
    factor: float
    storage: bool = False

    def required(self) -> frozenset[str]:
        return ReplaceParameters.needs | {"storage_replacement" if self.storage else "parameter_replacement"}

    @classmethod
    def draw(cls, drawer: OperationDrawer) -> ReplaceParameters:
        storage = drawer.pick_by_feature({"op.replace": False, "op.replace_storage": True})
        return cls(drawer.patterns(), drawer.choices.pick(_FACTORS), storage)

    def normalise(self, context: ProgramContext) -> Operation | None:
        patterns = context.replaceable(self.patterns)
        return replace(self, patterns=patterns) if patterns else None

    def simpler(self) -> Iterator[Operation]:
        yield EditFullParameters(self.patterns, self.factor)
        for name in self.patterns if len(self.patterns) > 1 else ():
            yield replace(self, patterns=(name,))

    def run(self, program: RankProgram) -> Values:
        with program.adapter.full_parameters(program.model, writeback=True) as full:
            shown = _shown(full)
            chosen = dict(matching(full.items(), self.patterns))
            user_code.replace_parameters(program.model, chosen, self.factor, storage=self.storage)
        return shown

    def replay(self, replay: Replay) -> Results:
        shown = _shown_to_each_rank(replay)
        replay.scale(self.patterns, self.factor)
        return shown


@dataclass(frozen=True, slots=True)
class UnshardFirst(TrainingPass):
    """Gathers units by hand, then does a micro-batch.

    Attributes:
        batch: Inputs.
        units: FQNs of the units; the root is the empty string.
        reshard: The units are released again before the micro-batch.
        asynchronous: The gathers are only begun. Every second unit's gather is waited for by hand, the others by their
            forward; before units are released all are waited for.
    """

    kind = "unshard_first"
    needs = frozenset({"explicit_unshard"})
    features = {"op.unshard_first": ("explicit_unshard",)}
    batch: Batch
    units: tuple[str, ...] = ("",)
    reshard: bool = False
    asynchronous: bool = False

    @classmethod
    def draw(cls, drawer: OperationDrawer) -> UnshardFirst:
        choices = drawer.choices
        units = ("", *(unit for unit in drawer.units if choices.chance(3)))
        units = units[1:] if choices.chance(3) else units
        return cls(drawer.batch(), units, choices.chance(3), choices.chance(2))

    def normalise(self, context: ProgramContext) -> Operation | None:
        return replace(self, units=tuple(dict.fromkeys(unit for unit in self.units if unit in context.units)))

    def simpler(self) -> Iterator[Operation]:
        yield ForwardBackward(self.batch)
        yield UnshardFirst(self.batch.plain())
        yield replace(self, units=("",))
        yield replace(self, reshard=False)
        yield replace(self, asynchronous=False)

    def most_passes(self, uses: int, *, frees_early: bool) -> int | None:
        return 1 + uses * (1 + frees_early)

    def may_stay_unsharded(self, before: frozenset[str], *, frees_early: bool, backward: bool) -> frozenset[str] | None:
        if backward:
            return frozenset()
        return before | {"", *self.units} if frees_early else None

    def run(self, program: RankProgram) -> Values:
        begin = program.adapter.unshard_async if self.asynchronous else program.adapter.unshard
        waits = [begin(program.model, unit) for unit in self.units]
        for wait in waits[:: 1 if self.reshard else 2]:
            if wait is not None:
                wait()
        for unit in self.units if self.reshard else ():
            program.adapter.reshard(program.model, unit)
        return ForwardBackward(self.batch).run(program)

    def replay(self, replay: Replay) -> Results:
        return ForwardBackward(self.batch).replay(replay)


@dataclass(frozen=True, slots=True)
class AssignData(ForwardPass):
    """Gives parameters new storage (`p.data = ...`) with values multiplied by a factor; then a forward without gradient.

    An implementation may notice the new storage only when it next uses the parameters, so a forward belongs to it.

    Attributes:
        patterns: Patterns of the parameters' names.
        factor: The factor for their values.
        batch: Inputs of the forward.
        in_place: The values change in place, as an optimizer changes them.
    """

    kind = "assign_data"
    needs = frozenset({"forward_only"})
    features = {"op.assign_data": ("data_assignment",)}
    runs_forward_alone = True
    writes_parameters = True
    patterns: tuple[str, ...]
    factor: float
    batch: Batch
    in_place: bool = field(default=False, metadata=ADDED_LATER)

    def required(self) -> frozenset[str]:
        how = "in_place_edits" if self.in_place else "data_assignment"
        return frozenset({how, "forward_only"}) | self.batch.required()

    def token(self) -> str:
        return f"{self.kind}[in_place]" if self.in_place else self.kind

    @classmethod
    def draw(cls, drawer: OperationDrawer) -> AssignData:
        factor = drawer.choices.pick(_FACTORS)
        return cls(drawer.patterns(), factor, drawer.batch())

    def other_settings(self) -> Iterator[tuple[str, Operation]]:
        yield "patterns", replace(self, patterns=())

    def normalise(self, context: ProgramContext) -> Operation | None:
        if context.tree is None:
            return self
        if context.mixed_precision:
            return None  # gathered parameters may be shown rounded, and so are values made from them
        patterns = context.used_patterns(self.patterns)
        # Every unit runs, since an unused unit may notice its new storage later.
        return replace(self, patterns=patterns, batch=replace(self.batch, usage=())) if patterns else None

    def simpler(self) -> Iterator[Operation]:
        yield AssignData(("*",), self.factor, self.batch.plain(), self.in_place)
        yield replace(self, patterns=("*",))

    def run(self, program: RankProgram) -> Values:
        import torch

        found = matching(program.adapter.named_parameters(program.model), self.patterns)
        change = user_code.scale if self.in_place else user_code.give_storage
        change([parameter for _, parameter in found], self.factor)
        with torch.no_grad():
            return program.call(self.batch).values()

    def replay(self, replay: Replay) -> Results:
        replay.scale(self.patterns, self.factor)
        # In training mode, as on the ranks; the graph that this builds is not used.
        return Forward(self.batch).replay(replay)


@dataclass(frozen=True, slots=True)
class Freeze(OfPatterns):
    """Sets `requires_grad=False` on the parameters whose name matches one of the patterns (fnmatch)."""

    kind = "freeze"
    needs = frozenset({"frozen_parameters", "thawed_parameters"})
    passes = 0
    features = {"op.freeze": ("frozen_parameters", "thawed_parameters")}
    flag = False

    def requires_grad_change(self) -> tuple[tuple[str, ...], bool] | None:
        return self.patterns, self.flag

    @classmethod
    def draw(cls, drawer: OperationDrawer) -> Self:
        return cls(drawer.patterns())

    def script_lines(self, name: str) -> list[str] | None:
        return [f"for p in matching(one.named(), {self.patterns!r}):", f"    p.requires_grad_({self.flag})"]

    def run(self, program: RankProgram) -> None:
        program.set_requires_grad(self.patterns, self.flag)

    def replay(self, replay: Replay) -> None:
        for fqn, parameter in matching(replay.parameters.items(), self.patterns):
            parameter.requires_grad_(self.flag)
            replay.compute[fqn].requires_grad_(self.flag)


@dataclass(frozen=True, slots=True)
class Thaw(Freeze):
    """Sets `requires_grad=True` on the parameters whose name matches one of the patterns (fnmatch)."""

    kind = "thaw"
    needs = frozenset({"thawed_parameters"})
    flag = True

    def changes_ignored(self) -> tuple[str, ...]:
        return self.patterns


@dataclass(frozen=True, slots=True)
class Move(Operation):
    """Calls `module.to` with the current device, which touches every parameter and must change none.

    Attributes:
        dtype: `module.to` this dtype too, for good: later inputs have it. Gradients and the optimizer are not carried
            over, so it comes before both.
    """

    kind = "move"
    passes = None
    features = {"op.move": (), "op.cast": ("dtype_cast", "late_optimizer")}
    drawn_with = ("op.move",)
    dtype: str | None = None

    def required(self) -> frozenset[str]:
        return frozenset({"dtype_cast"} if self.dtype else ())

    def new_dtype(self) -> str | None:
        return self.dtype

    def normalise(self, context: ProgramContext) -> Operation | None:
        # Only as a model's first operation does it mean the same for every implementation.
        return self if not self.dtype or (context.begins and context.may_be_cast(self.dtype)) else Move()

    def simpler(self) -> Iterator[Operation]:
        return iter(())

    def token(self) -> str:
        return f"{self.kind}[{self.dtype}]" if self.dtype else self.kind

    def script_lines(self, name: str) -> list[str] | None:
        return None if self.dtype else ['one.model.to("cpu")']

    def run(self, program: RankProgram) -> None:
        program.model.to(next(program.model.parameters()).device)
        if self.dtype is not None:
            program.case = replace(program.case, model=replace(program.case.model, dtype=self.dtype))
            program.model.to(program.dtype)

    def replay(self, replay: Replay) -> None:
        if self.dtype is not None:
            replay.case = replace(replay.case, model=replace(replay.case.model, dtype=self.dtype))
            replay.cast()
