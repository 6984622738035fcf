"""Saving, and loading into a new model and optimizer, on other ranks too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fsdp_testing.cases.operations.operation import Batch, Operation
from fsdp_testing.cases.operations.saving import FORMS, load_moments, saved, state_of_each_rank
from fsdp_testing.errors import InvalidRecord

if TYPE_CHECKING:
    from fsdp_testing.cases.drawing.normal_form import ProgramContext
    from fsdp_testing.cases.drawing.operation_drawer import OperationDrawer
    from fsdp_testing.oracle.execute import RankProgram, Values
    from fsdp_testing.oracle.replay import Replay, Results

ELSEWHERE = ("full_shard", "shard_grad_op", "no_shard")


@dataclass(frozen=True, slots=True)
class Reload(Operation):
    """Saves model and optimizer, rebuilds both from other values, loads, and goes on with the new ones.

    Gradients are gone afterwards; a new optimizer has an empty state and the case's learning rate.

    Attributes:
        form: `full`, `sharded` or `local` model state.
        optimizer: Optimizer state is saved and loaded too, if there is an optimizer.
        units: Inner units of the new model; None keeps the plan. Another plan needs the full form.
        through: Between saving and loading, one process without sharding loads the state, trains a step on these inputs
            (those of rank 0), and saves: the state comes from a world of another size. Needs the full form.
    """

    kind = "reload"
    passes = None
    features = {
        "op.reload": ("full_state_dict",),
        "op.reload_optimizer": ("full_state_dict", "optim_state"),
        "op.reload_sharded": ("sharded_state_dict",),
        "op.reload_plan": ("full_state_dict", "nested_wrapping"),
        "op.reload_world": ("full_state_dict",),
    }
    drawn_with = ("op.reload", "op.reload_sharded")
    renews_model = True
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

    @property
    def saves_optimizer(self) -> bool:
        return self.optimizer

    def batches(self) -> tuple[Batch, ...]:
        return () if self.through is None else (self.through,)

    def required(self) -> frozenset[str]:
        tags = {f"{self.form}_state_dict"} | ({"optim_state"} if self.optimizer else set())
        return frozenset(tags | ({"nested_wrapping"} if self.units else set()))

    def pending_after(self, pending: bool) -> bool:
        return False

    def new_units(self) -> tuple[str, ...] | None:
        return self.units

    @classmethod
    def draw(cls, drawer: OperationDrawer) -> Reload:
        choices, swarm = drawer.choices, drawer.swarm
        optimizer = "op.reload_optimizer" in swarm and choices.chance(2)
        if "op.reload_sharded" in swarm and ("op.reload" not in swarm or choices.chance(2)):
            return cls("sharded", optimizer)
        another = "op.reload_plan" in swarm and choices.chance(2)
        units = tuple(unit for unit in drawer.units if choices.chance(2)) if another else None
        elsewhere = "op.reload_world" in swarm and choices.chance(2)
        through = Batch(drawer.next_seed(), (choices.integer(1, 4),)) if elsewhere else None
        return cls("full", optimizer, units, through)

    def normalise(self, context: ProgramContext) -> Operation | None:
        if context.mixed_precision or context.has_buffers_of_ranks:
            return None  # saved state on which the ranks must agree, and do not
        # Every rank acts as the one process, which computes with its own rank's counts.
        through = self.through if self.through is None or not context.counts_runs else None
        units = self.units if self.units is None else context.units_of_plan(self.units)
        return replace(self, units=units, through=through)

    def simpler(self) -> Iterator[Operation]:
        yield Reload(optimizer=self.optimizer)
        yield replace(self, through=None)
        yield replace(self, units=None)
        yield replace(self, optimizer=False)
        yield replace(self, form="full")

    def may_stay_unsharded(self, before: frozenset[str], *, frees_early: bool, backward: bool) -> frozenset[str] | None:
        return frozenset()  # a new model, of which nothing has run

    def token(self) -> str:
        plan = "" if self.units is None else ",plan"
        through = "" if self.through is None else ",one_process"
        return f"{self.kind}[{'optimizer,' if self.optimizer else ''}{self.form}{plan}{through}]"

    def script_lines(self, name: str) -> list[str] | None:
        if self.units is not None or self.through is not None:
            return None
        return [f"one.reload({self.form == 'full'}, {self.optimizer})"]

    def run(self, program: RankProgram) -> Values:
        adapter, model, optimizer = program.adapter, program.model, program.optimizer
        load: Any = getattr(adapter, f"load_{self.form}_state_dict")
        state, moments, values = saved(program, self)
        if "saved_on_rank_0" in program.case.wrapping.settings:
            state = _from_rank_0(state, program.rank)
        flags = {name: parameter.requires_grad for name, parameter in adapter.named_parameters(model)}
        if self.through is not None:
            state, moments = program.train_in_one_process(self.through, state, moments, flags)
        adapter.finish(model)
        if self.units is not None:
            # This plan stays: a later reload without a plan keeps it.
            program.case = replace(program.case, wrapping=replace(program.case.wrapping, units=self.units))
        program.rebuild(flags)
        load(program.model, state)
        if optimizer is not None:
            program.build_optimizer()
        if moments is not None and program.optimizer is not None:
            load_moments(program, self.form, moments)
        return values

    def replay(self, replay: Replay) -> Results:
        replay.clear_gradients()
        values = state_of_each_rank(replay, self)
        renews = replay.optimizer is not None and not self.optimizer
        if renews:
            replay.build_optimizer()
        if self.through is not None:
            replay.train_among(1, self.through)
            if renews:
                replay.build_optimizer()
        if self.units is not None:
            for replica in replay.replicas:
                replay.disturbance.divided(replica, replace(replay.case.wrapping, units=self.units))
        return values


def _from_rank_0(state: Any, rank: int) -> Any:
    """Return the state that rank 0 has. Collectives: a broadcast of objects; every rank calls."""
    import torch.distributed as dist

    box = [state if rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    return box[0]


@dataclass(frozen=True, slots=True)
class TrainElsewhere(Operation):
    """Saves model and optimizer. Some ranks load the state into new ones, train a step and save; all load that into new ones.

    So the state goes to another number of ranks, plan and strategy, and back. Gradients are gone afterwards.

    Attributes:
        batch: Inputs of the step; the ranks that train have those of the first ranks.
        ranks: How many train, at least one and not all: a world of one rank has no others.
        last: The last ranks train, without rank 0.
        units: Inner units of their model; None keeps the plan.
        strategy: Strategy of their model.
        directory: States go through directories of `torch.distributed.checkpoint`, in shards; otherwise as full states in memory.
        max_norm: They clip their gradients to this norm before the step; None: they do not.
    """

    kind = "train_elsewhere"
    needs = frozenset({"full_state_dict", "optim_state", "sub_groups"})
    passes = None
    features = {
        "op.elsewhere_full_shard": ("full_state_dict", "optim_state", "sub_groups", "full_shard"),
        "op.elsewhere_shard_grad_op": ("full_state_dict", "optim_state", "sub_groups", "shard_grad_op"),
        "op.elsewhere_no_shard": ("full_state_dict", "optim_state", "sub_groups", "no_shard"),
        "op.elsewhere_directory": ("sharded_state_dict",),
        "op.elsewhere_clip": ("clip_grad_norm",),
    }
    drawn_with = tuple(f"op.elsewhere_{strategy}" for strategy in ELSEWHERE)
    renews_model = True
    batch: Batch
    ranks: int = 1
    last: bool = False
    units: tuple[str, ...] | None = None
    strategy: str = "full_shard"
    directory: bool = False
    max_norm: float | None = None

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.strategy not in ELSEWHERE:
            raise InvalidRecord(
                f"TrainElsewhere: expected ranks >= 1 and a strategy of {ELSEWHERE}, got {self.ranks} and {self.strategy!r}."
            )

    @property
    def saves_optimizer(self) -> bool:
        return True

    @classmethod
    def draw(cls, drawer: OperationDrawer) -> TrainElsewhere:
        choices = drawer.choices
        strategy = drawer.pick_by_feature({f"op.elsewhere_{strategy}": strategy for strategy in ELSEWHERE})
        units = tuple(unit for unit in drawer.units if choices.chance(2)) if choices.chance(2) else None
        batch = Batch(drawer.next_seed(), (choices.integer(1, 4),))
        directory = "op.elsewhere_directory" in drawer.swarm and choices.chance(2)
        max_norm = 0.5 if "op.elsewhere_clip" in drawer.swarm and choices.chance(2) else None
        return cls(batch, choices.integer(1, 3), choices.chance(2), units, strategy, directory, max_norm)

    def normalise(self, context: ProgramContext) -> Operation | None:
        size = context.case.world.size
        if context.mixed_precision or context.has_buffers_of_ranks or context.counts_runs or size == 1:
            return None
        units = self.units if self.units is None else context.units_of_plan(self.units)
        return replace(self, ranks=min(self.ranks, size - 1), units=units)

    def required(self) -> frozenset[str]:
        nested = {"nested_wrapping"} if self.units else set()
        sharded = {"sharded_state_dict"} if self.directory else set()
        clipped = set() if self.max_norm is None else {"clip_grad_norm"}
        return super(TrainElsewhere, self).required() | {self.strategy} | nested | sharded | clipped

    def simpler(self) -> Iterator[Operation]:
        yield Reload()
        yield replace(self, directory=False)
        yield replace(self, max_norm=None)
        yield replace(self, ranks=1)
        yield replace(self, last=False)
        yield replace(self, units=None)
        yield replace(self, strategy="full_shard")
        yield from (replace(self, batch=batch) for batch in self.batch.simpler())

    def pending_after(self, pending: bool) -> bool:
        return False

    def may_stay_unsharded(self, before: frozenset[str], *, frees_early: bool, backward: bool) -> frozenset[str] | None:
        return frozenset()  # a new model, of which nothing has run

    def other_plans(self) -> tuple[tuple[str, ...], ...]:
        return () if self.units is None else (self.units,)

    def groups(self, size: int) -> tuple[tuple[int, ...], ...]:
        first = size - self.ranks if self.last else 0
        return (tuple(range(first, first + self.ranks)),)

    def token(self) -> str:
        plan = "" if self.units is None else ",plan"
        how = f"{',directory' if self.directory else ''}{'' if self.max_norm is None else ',clip'}"
        return f"{self.kind}[{self.strategy}{plan}{how}]"

    def run(self, program: RankProgram) -> None:
        adapter, model, optimizer = program.adapter, program.model, program.optimizer
        flags = {name: parameter.requires_grad for name, parameter in adapter.named_parameters(model)}
        wrapping = replace(
            program.case.wrapping, units=program.case.wrapping.units if self.units is None else self.units
        )
        elsewhere = replace(program.case, wrapping=wrapping, strategy=self.strategy)
        (ranks,) = self.groups(program.case.world.size)
        with program.saved_as(directory=self.directory) as saved:
            saved.save(adapter, model, optimizer, None)
            adapter.finish(model)
            program.train_among(ranks, elsewhere, self.batch, saved, flags, self.max_norm)
            program.rebuild(flags)
            saved.source().load_model(adapter, program.model)
            if optimizer is not None:
                program.build_optimizer()
                saved.source().load_optimizer(adapter, program.model, program.optimizer)

    def replay(self, replay: Replay) -> None:
        replay.clear_gradients()
        replay.train_among(self.ranks, self.batch, self.max_norm)
