"""Saving, and loading the saved state into the same model and optimizer."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fsdp_testing.cases.operations.operation import Operation
from fsdp_testing.errors import InvalidRecord

if TYPE_CHECKING:
    from torch import Tensor

    from fsdp_testing.adapters.adapter import Adapter
    from fsdp_testing.cases.drawing.normal_form import ProgramContext
    from fsdp_testing.cases.drawing.operation_drawer import OperationDrawer
    from fsdp_testing.cases.operations.reloading import Reload
    from fsdp_testing.oracle.execute import RankProgram, Values
    from fsdp_testing.oracle.replay import Replay, Results

FORMS = ("full", "sharded", "local")
_NAMES = "structure of the saved state"
_HAS_SAVED = "the normal form leaves no restore without a save before it"


@dataclass(frozen=True, slots=True)
class Save(Operation):
    """Saves the model's state and goes on with the same model; what the full form holds is compared.

    Attributes:
        form: `full`, `sharded` or `local`.
        optimizer: Optimizer state is saved too, if there is an optimizer.
    """

    kind = "save"
    passes = None
    features = {"op.save": ("full_state_dict",)}
    form: str = "full"
    optimizer: bool = False

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise InvalidRecord(f"Save.form: expected one of {FORMS}, got {self.form!r}. Choose one of them.")

    @property
    def saves_optimizer(self) -> bool:
        return self.optimizer

    def required(self) -> frozenset[str]:
        return frozenset({f"{self.form}_state_dict"} | ({"optim_state"} if self.optimizer else set()))

    @classmethod
    def draw(cls, drawer: OperationDrawer) -> Save:
        restores, choices = "op.restore" in drawer.swarm, drawer.choices
        sharded = restores and "op.restore_sharded" in drawer.swarm and choices.chance(2)
        optimizer = restores and "op.restore_optimizer" in drawer.swarm and choices.chance(2)
        return cls("sharded" if sharded else "full", optimizer)

    def normalise(self, context: ProgramContext) -> Operation | None:
        if context.mixed_precision or context.has_buffers_of_ranks:
            return None
        context.saved = self.form
        return self

    def simpler(self) -> Iterator[Operation]:
        yield Save()
        yield replace(self, optimizer=False)
        yield replace(self, form="full")

    def token(self) -> str:
        return f"{self.kind}[optimizer]" if self.optimizer else self.kind

    def run(self, program: RankProgram) -> Values:
        state, optimizer, values = saved(program, self)
        program.save_point = self.form, copied(state), copied(optimizer)
        return values

    def replay(self, replay: Replay) -> Results:
        states = [module.state_dict() for module in dict.fromkeys((replay.master, *replay.replicas))]
        optimizer = replay.optimizer.state_dict() if self.optimizer and replay.optimizer is not None else None
        replay.save_point = copy.deepcopy((states, optimizer))
        return state_of_each_rank(replay, self)


@dataclass(frozen=True, slots=True)
class Restore(Operation):
    """Loads what the last `Save` saved into the same model, and into its optimizer if that was saved.

    So training is rolled back: later operations have left their numbers and their memory in the model.

    Attributes:
        keeps_gradients: The user does not clear the gradients first, and loading leaves them as they are.
    """

    kind = "restore"
    passes = None
    features = {
        "op.restore": ("full_state_dict",),
        "op.restore_optimizer": ("full_state_dict", "optim_state"),
        "op.restore_sharded": ("sharded_state_dict",),
    }
    drawn_with = ("op.restore",)
    writes_parameters = True
    keeps_gradients: bool = False

    def pending_after(self, pending: bool) -> bool:
        return pending and self.keeps_gradients

    def normalise(self, context: ProgramContext) -> Operation | None:
        return None if context.saved is None else self

    def simpler(self) -> Iterator[Operation]:
        if self.keeps_gradients:
            yield Restore()

    def run(self, program: RankProgram) -> None:
        adapter, model = program.adapter, program.model
        assert program.save_point is not None, _HAS_SAVED
        form, state, optimizer = program.save_point
        if not self.keeps_gradients:
            program.zero_grad(set_to_none=True)
        # Copied: an implementation may keep loaded tensors as its own memory, and the state may be loaded again.
        getattr(adapter, f"load_{form}_state_dict")(model, copied(state))
        if optimizer is not None and program.optimizer is not None:
            load_moments(program, form, copied(optimizer))

    def replay(self, replay: Replay) -> None:
        assert replay.save_point is not None, _HAS_SAVED
        states, optimizer = replay.save_point
        if not self.keeps_gradients:
            replay.clear_gradients()
        for module, state in zip(dict.fromkeys((replay.master, *replay.replicas)), states):
            module.load_state_dict(state)
        if optimizer is not None and replay.optimizer is not None:
            replay.optimizer.load_state_dict(copy.deepcopy(optimizer))


def copied(state: Any) -> Any:
    """Return a copy of a saved state; sharded tensors keep their process groups."""
    import torch

    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, Mapping):
        return {key: copied(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(map(copied, state))
    return copy.deepcopy(state)


def saved(program: RankProgram, operation: Save | Reload) -> tuple[Any, Any, Values]:
    """Return the states of model and optimizer (None: not asked for), and the contents of their full forms.

    A rank that loads its own state sees no other rank's: only these values show what the others have.
    """
    import torch

    adapter, model, optimizer = program.adapter, program.model, program.optimizer
    state: Any = getattr(adapter, f"{operation.form}_state_dict")(model)
    full = state if operation.form == "full" else {}
    held = {f"state.{fqn}": value for fqn, value in full.items()}
    moments = adapter.full_optimizer_state(model, optimizer) if operation.optimizer and optimizer is not None else None
    shapes = {fqn: parameter.shape for fqn, parameter in program.plain_part("").named_parameters()}
    for fqn, entries in (moments or {}).get("state", {}).items():
        for name, entry in entries.items() if fqn in shapes else ():
            if entry is not None:
                tensor = torch.as_tensor(entry)
                # Completeness is enough: an implementation may save flat parameters as they are.
                flat = tensor.shape == (shapes[fqn].numel(),)
                held[f"optimizer.{name}.{fqn}"] = tensor.reshape(shapes[fqn]) if flat else tensor
    values = {name: value.detach().clone() for name, value in held.items() if isinstance(value, torch.Tensor)}
    if operation.form == "full":
        alone = "saved_on_rank_0" in program.case.wrapping.settings and program.rank > 0
        known = () if alone else program.plain_part("").state_dict()
        unknown = {*state, *((moments or {}).get("state", ()) if alone else ())} - set(known)
        values[_NAMES] = _as_numbers(sorted(unknown))
    if moments is not None and optimizer is not None and _in_shards(adapter, operation.form):
        moments = adapter.sharded_optimizer_state(model, optimizer)
    return state, moments, values


def load_moments(program: RankProgram, form: str, moments: Any) -> None:
    """Load the optimizer state that `saved` returned beside a model state of this form."""
    adapter = program.adapter
    load: Any = adapter.load_sharded_optimizer_state if _in_shards(adapter, form) else adapter.load_full_optimizer_state
    load(program.model, program.optimizer, moments)


def _in_shards(adapter: Adapter, form: str) -> bool:
    return form == "sharded" and not {"sharded_optimizer_state", "load_sharded_optimizer_state"} & adapter.missing


def _as_numbers(unknown: Iterable[str]) -> Tensor:
    """Return a text that lists the names in a state: the plain module's, and others."""
    import torch

    return torch.tensor(list(" and ".join(("the module's names", *unknown)).encode()), dtype=torch.uint8)


def state_of_each_rank(replay: Replay, operation: Save | Reload) -> Results:
    """Return what every rank must have saved."""
    import torch

    values: Results = {}
    # Without the buffers that are not saved.
    names = replay.master.state_dict() if operation.form == "full" else {}
    alone = "saved_on_rank_0" in replay.case.wrapping.settings
    for rank in range(replay.size):
        values |= replay.result(rank, _NAMES, _as_numbers(())) if names else {}
        if alone and rank > 0:
            continue
        for fqn, tensor in (*replay.parameters.items(), *replay.replicas[rank].named_buffers()):
            # Buffers are held in a dtype of their own in mixed precision, and saved in that of the module.
            values |= replay.result(rank, f"state.{fqn}", tensor.to(names[fqn].dtype)) if fqn in names else {}
        for fqn, parameter in replay.parameters.items() if operation.optimizer else ():
            for name, entry in replay.optimizer_state(parameter).items():
                values |= replay.saved_state(rank, fqn, name, torch.as_tensor(entry))
    return values
