"""An optimizer's state: it belongs to the same parameters in a fresh instance, another wrapping, another number of ranks."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from fsdp_testing.cases.operations import Restore, Save, TrainElsewhere
from fsdp_testing.cases.operations.reloading import ELSEWHERE
from fsdp_testing.cases.records import (
    Batch,
    Case,
    Freeze,
    Observe,
    OptimizerSpec,
    Reload,
    SetLr,
    Step,
    Thaw,
    WrappingPlan,
)
from fsdp_testing.checks.suites.check import (
    ADAMW,
    LOCKSTEP,
    ODD,
    PLAIN_SGD,
    Check,
    cases,
    forward,
    iteration,
    iterations,
    micro_batch,
)
from fsdp_testing.checks.suites.other_worlds import judge_moved
from fsdp_testing.checks.suites.programs import review_remarks
from fsdp_testing.checks.suites.state import LOW, NESTED, rolled_back, saved
from fsdp_testing.checks.suites.state_programs import LabelledProgram, RefusingProgram, RemarkingProgram, same_values
from fsdp_testing.judging.case_runner import RunMode
from fsdp_testing.oracle import models, optimizers, rank_jobs
from fsdp_testing.oracle.execute import RankProgram
from fsdp_testing.oracle.replay import Replay


def _without_a_parameter(saved: Any) -> Any:
    """Return an optimizer's state that knows nothing of one of its parameters."""
    dropped = next(iter(saved["state"]))
    groups = [{**group, "params": [n for n in group["params"] if n != dropped]} for group in saved["param_groups"]]
    return {
        "state": {fqn: entries for fqn, entries in saved["state"].items() if fqn != dropped},
        "param_groups": groups,
    }


def _with_another_parameter(saved: Any) -> Any:
    first, *rest = saved["param_groups"]
    groups = [{**first, "params": [*first["params"], "layers.9.weight"]}, *rest]
    return {"state": {**saved["state"], "layers.9.weight": next(iter(saved["state"].values()))}, "param_groups": groups}


def _with_misshapen_moments(saved: Any) -> Any:
    def longer(value: Any) -> Any:
        has_rows = isinstance(value, torch.Tensor) and value.dim() > 0
        return value.new_zeros(value.shape[0] + 1, *value.shape[1:]) if has_rows else value

    changed = next(iter(saved["state"]))
    entries = {name: longer(value) for name, value in saved["state"][changed].items()}
    return {**saved, "state": {**saved["state"], changed: entries}}


WRONG_OPTIMIZERS: Mapping[str, Callable[[Any], Any]] = {
    "optimizer state that lacks a parameter": _without_a_parameter,
    "optimizer state with an unknown parameter": _with_another_parameter,
    "optimizer state with moments of another shape": _with_misshapen_moments,
}
"""By the label of the observation after which it is loaded, as `WRONG_STATES`."""


class RefusingOptimizer(RefusingProgram):
    """Loads the saved state of its optimizer, then the unfitting one that the last observation names, and trains a step."""

    def statements(self) -> Iterator[str]:
        """Yield a fault if it was loaded and the step taken."""
        make, adapter = WRONG_OPTIMIZERS.get(self.quantity), self.adapter
        if make is None or self.optimizer is None:
            return  # a shortened case
        with self._inside():
            saved = adapter.full_optimizer_state(self.model, self.optimizer)
        self._train_from(saved)  # who cannot train from this refuses anything
        try:
            self._train_from(make(saved))
        except Exception:  # noqa: BLE001 - whatever it raises, it refuses
            return
        yield f"an {self.quantity} was loaded, expected it to be refused"

    def _train_from(self, saved: Any) -> None:
        assert self.optimizer is not None
        self.adapter.load_full_optimizer_state(self.model, self.optimizer, saved)
        self.backward(self.call(Batch(1)).loss)
        self.adapter.step(self.model, self.optimizer)


class StoredDtypes(RemarkingProgram):
    """Looks at the dtypes of saved optimizer state."""

    def statements(self) -> Iterator[str]:
        """Yield the entries that are not in the dtype of the stored parameters."""
        if self.optimizer is None:
            return
        with self._inside():
            saved = self.adapter.full_optimizer_state(self.model, self.optimizer)
        met: list[torch.Tensor] = []

        def note(tensor: torch.Tensor) -> torch.Tensor:
            met.append(tensor)
            return tensor

        models.map_tensors(note, saved)
        # A step count is a scalar, and of a dtype of its own.
        wrong = {models.dtype_name(t.dtype) for t in met if t.dim() and t.is_floating_point() and t.dtype != self.dtype}
        if not any(tensor.dim() for tensor in met):
            yield "the saved optimizer state has no tensor"
        for name in sorted(wrong):
            yield f"saved optimizer state has dtype {name}, expected {models.dtype_name(self.dtype)}"


class EntriesOfUsers(LabelledProgram):
    """Keeps an entry of its own with each parameter, beside the moments, and loads it into a new optimizer."""

    def statements(self) -> Iterator[str]:
        """Yield the entries that are lost or changed."""
        adapter, name, label = self.adapter, "of the user", self.quantity
        if self.optimizer is None or label not in ENTRIES:
            return  # a shortened case
        value, lone = ENTRIES[label](self.dtype), label == OF_NO_PARAMETER
        kept: Any = self.optimizer.state
        for entries in [kept] if lone else list(kept.values()):
            entries[name] = copy.deepcopy(value)
        with self._inside():
            saved = adapter.full_optimizer_state(self.model, self.optimizer)
            adapter.finish(self.model)
            self.rebuild({})
            self.build_optimizer()
            adapter.load_full_optimizer_state(self.model, self.optimizer, saved)
            again = adapter.full_optimizer_state(self.model, self.optimizer)
        for fqn, _ in [("", None)] if lone else self.plain_part("").named_parameters():
            for when, state in (("saved", saved), ("loaded", again)):
                entries = state["state"] if lone else state["state"].get(fqn, {})
                if not same_values(entries.get(name), value):
                    yield f"{fqn or 'state'} has {entries.get(name)!r} in the {when} state, expected {value!r}"


OF_NO_PARAMETER = "an entry of no parameter"
ENTRIES: Mapping[str, Callable[[torch.dtype], Any]] = {
    "a number": lambda dtype: 7,
    "NaN": lambda dtype: math.nan,
    "a list": lambda dtype: [0.5, 1.5],
    # Of a shape that no parameter has.
    "a tensor of another shape": lambda dtype: torch.tensor([[[1.0, math.nan], [0.0, math.inf]]], dtype=dtype),
    OF_NO_PARAMETER: lambda dtype: {"seen": 7, "mask": torch.ones(1, 2, 2, dtype=dtype)},
}
"""What a user keeps with a parameter, by the label of the observation after which it is saved. No text:
`torch.optim.Optimizer.load_state_dict` turns it into another."""


class WithoutGroups(LabelledProgram):
    """Loads its saved state without `param_groups` into a new optimizer with another learning rate."""

    def statements(self) -> Iterator[str]:
        """Yield the entries that differ; nothing if the state is refused."""
        adapter = self.adapter
        if self.optimizer is None or self.quantity != NO_GROUPS:
            return  # a shortened case
        with self._inside():
            saved = adapter.full_optimizer_state(self.model, self.optimizer)
            adapter.finish(self.model)
            self.rebuild({})
            self.build_optimizer()
            for group in self.optimizer.param_groups:
                group["lr"] = _OWN_RATE
            try:
                adapter.load_full_optimizer_state(self.model, self.optimizer, {"state": saved["state"]})
            except Exception:  # noqa: BLE001 - whatever it raises, it refuses
                return
            again = adapter.full_optimizer_state(self.model, self.optimizer)
        for fqn, entries in saved["state"].items():
            for name, value in entries.items():
                if not same_values(again["state"].get(fqn, {}).get(name), value):
                    yield f"{name} of {fqn} was lost or changed, expected that of the saved state"
        rates = {float(group["lr"]) for group in again["param_groups"]}
        if rates != {_OWN_RATE}:
            yield f"learning rates are {sorted(rates)}, expected the optimizer's own, {_OWN_RATE}"


NO_GROUPS = "a state without groups"
_OWN_RATE = 0.25


class ReorderedProgram(RankProgram):
    """Each optimizer but the first has the parameters in the reverse order."""

    builds = 0

    def build_optimizer(self) -> None:
        order = 1 if self.builds == 0 else -1
        self.builds += 1
        self.optimizer = self.adapter.build_optimizer(self.model, partial(_over, self.case, order))


def _over(case: Any, order: int, parameters: Any) -> torch.optim.Optimizer:
    return optimizers.build_optimizer(case, list(parameters)[::order])


_OTHER_SETTINGS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.7, "weight_decay": 0.3, "nesterov": True, "maximize": True},
    "adamw": {"lr": 0.7, "weight_decay": 0.3, "betas": (0.5, 0.6), "eps": 0.5, "maximize": True},
}


class GroupedProgram(RankProgram):
    """Its first optimizer decays weights alone; each later one is built with other settings, which loading must replace."""

    builds = 0

    def build_optimizer(self) -> None:
        fresh = _OTHER_SETTINGS[self.case.optimizer.name] if self.builds else {}
        self.builds += 1
        with self._inside():
            names = {id(parameter): fqn for fqn, parameter in self.adapter.named_parameters(self.model)}
            make = partial(_grouped, self.case, names, fresh)
            self.optimizer = self.adapter.build_optimizer(self.model, make)


class GroupedReplay(Replay):
    """The oracle's run of it."""

    def build_optimizer(self) -> None:
        names = {id(parameter): fqn for fqn, parameter in self.parameters.items()}
        self.optimizer = _grouped(self.case, names, {}, self.parameters.values())


def _grouped(
    case: Case, names: Mapping[int, str], fresh: Mapping[str, Any], parameters: Iterable[nn.Parameter]
) -> torch.optim.Optimizer:
    """Build the case's optimizer with biases in a group of their own, which is not decayed and has half the rate."""
    groups: dict[bool, list[nn.Parameter]] = {False: [], True: []}
    for parameter in parameters:
        groups[names[id(parameter)].endswith("bias")].append(parameter)
    rate: Any = case.optimizer.arguments["lr"]
    own = {"lr": 0.5 * rate, "weight_decay": 0.0}
    made: Any = [{"params": groups[False], **fresh}, {"params": groups[True], **own, **fresh}]
    return optimizers.build_optimizer(case, made)


REFUSED_OPTIMIZER = RunMode(rank_jobs.run_as, (RefusingOptimizer, {}), review=review_remarks)
OF_USERS = RunMode(rank_jobs.run_as, (EntriesOfUsers, {}), review=review_remarks)
WITHOUT_GROUPS = RunMode(rank_jobs.run_as, (WithoutGroups, {}), review=review_remarks)
STORED_DTYPES = RunMode(rank_jobs.run_as, (StoredDtypes, {}), review=review_remarks)
REORDERED = RunMode(rank_jobs.run_as, (ReorderedProgram, {}))
GROUPED = RunMode(rank_jobs.run_as, (GroupedProgram, {}), rank_jobs.expect_as, (GroupedReplay, {}))

_DECAYED = OptimizerSpec("sgd", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1})
_ONE, _ALL = ((True, False, False),), ((True, True, True),)


def _with_optimizer(form: str, *optimizers: OptimizerSpec) -> tuple[Case, ...]:
    program = (*iterations(2), Reload(form), Observe(), *iterations(2, first=2))
    return tuple(case for optimizer in optimizers for case in cases("uneven", *program, optimizer=optimizer))


def _on_some_ranks(case: Case) -> Case:
    """Return the case with all ranks but one (one, if alone) elsewhere, under its own strategy where that is possible."""
    strategy = case.strategy if case.strategy in ELSEWHERE else "full_shard"
    program = (
        replace(operation, ranks=max(1, case.world.size - 1), strategy=strategy)
        if isinstance(operation, TrainElsewhere)
        else operation
        for operation in case.program
    )
    return replace(case, program=tuple(program))


CHECKS: tuple[Check, ...] = (
    saved("optim_state.rolled_back",
          "Loading brings back a model and an optimizer that were trained further since.",
          rolled_back("full", "uneven", optimizer=ADAMW), rolled_back("full", "mlp", SetLr(0.2), optimizer=_DECAYED),
          source="torch.optim.Optimizer.load_state_dict", sizes=ODD),
    saved("optim_state.rolled_back_to_the_start", "Loaded into an optimizer that stepped since, the state of one that never "
        "stepped leaves it none.",
          cases("mlp", Save(optimizer=True), *iterations(2), Restore(), Observe(), *iterations(2, first=2), optimizer=ADAMW),
          source="torch.optim.Optimizer.load_state_dict"),
    saved("optim_state.fresh_instance",
          "Model and optimizer, loaded into fresh instances, continue as if they had never been saved.",
          _with_optimizer("full", ADAMW, _DECAYED), sizes=ODD),
    saved("optim_state.sharded_model", "The same with model and optimizer saved in shards.",
          _with_optimizer("sharded", ADAMW), needs={"full_state_dict"}),
    saved("optim_state.strict", "Optimizer state with a missing parameter, an extra one or moments of another shape is refused.",
          *(cases("mlp", *iteration(0), Observe(wrong), optimizer=ADAMW) for wrong in WRONG_OPTIMIZERS),
          source="torch.optim.Optimizer.load_state_dict", needs={"optim_state"}, mode=REFUSED_OPTIMIZER),
    saved("optim_state.dtypes", "Saved optimizer state has the storage dtype of parameters.",
          *(cases("mlp", *iteration(0), dtype="float32", optimizer=ADAMW, precision=precision) for precision in LOW),
          source="torch.distributed.fsdp.MixedPrecision", comparison=LOCKSTEP, needs={"optim_state"}, mode=STORED_DTYPES),
    saved("optim_state.entries_of_users", "Entries that a user keeps with parameters are saved and loaded as they are.",
          *(cases("mlp", *iteration(0), Observe(label), optimizer=ADAMW) for label in ENTRIES),
          source="torch.optim.Optimizer.state", needs={"optim_state", "user_entries"}, mode=OF_USERS),
    saved("optim_state.without_groups", "A state without `param_groups` is loaded, and settings stay; or it is refused.",
          cases("mlp", *iteration(0), Observe(NO_GROUPS), optimizer=ADAMW),
          source="fsdp_ref.checkpoint.optim_load", needs={"optim_state"}, mode=WITHOUT_GROUPS),
    saved("optim_state.groups", "Each group of parameters gets its own settings back, whatever the new optimizer was built with.",
          *(cases("mlp", *iterations(2), Reload(), Observe(), *iterations(2, first=2), optimizer=optimizer)
            for optimizer in (_DECAYED, OptimizerSpec("adamw", {"lr": 0.02, "weight_decay": 0.1}))),
          cases("mlp", *iteration(0), Save(optimizer=True), SetLr(0.3), *iteration(1), Restore(), *iteration(2),
                optimizer=_DECAYED),
          source="torch.optim.Optimizer.load_state_dict", needs={"frozen_mixed_unit"}, mode=GROUPED, by_name=True),
    saved("optim_state.reordered", "State is loaded by parameter name, whatever the order in the new optimizer.",
          cases("mlp uneven", *iterations(2), Reload(), Observe(), *iterations(2, first=2), optimizer=ADAMW),
          needs={"reordered_optimizer"}, mode=REORDERED),
    saved("optim_state.learning_rate", "The learning rate at the time of saving is restored, zero included.",
          cases("mlp", *iteration(0), SetLr(0.2), Reload(), *iterations(2, first=1), SetLr(0.0), Reload(), *iteration(3)),
          source="pytorch PR 128685"),
    saved("optim_state.other_wrapping", "Optimizer state saved under one wrapping loads under another.",
          cases("mlp", *iterations(2), Reload(units=()), Observe(), *iteration(2), Reload(units=("layers.2",)), *iteration(3),
                optimizer=ADAMW), needs=NESTED),
    saved("optim_state.other_world_size",
          "Optimizer state of N ranks loads and trains on N+1 ranks, and then on N ranks again.",
          cases("uneven", *iteration(0), SetLr(0.02), *iteration(1), Save(optimizer=True), optimizer=ADAMW),
          needs={"full_state_dict", "optim_state"}, judge=judge_moved),
    saved("optim_state.some_ranks",
          "Some of the ranks load and train the state of all ranks; then all ranks load theirs.",
          *(cases("uneven", *iterations(2), TrainElsewhere(Batch(7), 1, last), Observe(), Save(optimizer=True), *iteration(2),
                  optimizer=ADAMW) for last in (False, True)),
          needs={"full_state_dict", "optim_state", "sub_groups"}, fit=_on_some_ranks),
    saved("optim_state.some_ranks_clip", "The norm by which some of the ranks clip is that of their own gradients.",
          *(cases("uneven", *iterations(2), TrainElsewhere(Batch(7), 1, last, max_norm=0.01), Observe(), *iteration(2),
                  optimizer=ADAMW) for last in (False, True)),
          needs={"full_state_dict", "optim_state", "sub_groups"}, fit=_on_some_ranks),
    saved("optim_state.before_first_step",
          "An optimizer that never stepped can be saved and loaded; its step counts start at zero, and its rate stays.",
          cases("mlp", Reload(), Observe(), *iterations(2), optimizer=ADAMW),
          cases("mlp", Save(optimizer=True), Observe(), *iteration(0), optimizer=PLAIN_SGD),
          source="torch.distributed.checkpoint.state_dict.get_optimizer_state_dict"),
    saved("optim_state.partly_stepped", "State of parameters that were never stepped, which is none, is saved and loaded.",
          *(cases("conditional", *iteration(0, usage=_ONE), *save, *iteration(1, usage=_ONE), Restore(), Observe(),
                  *iterations(2, first=2, usage=_ALL), wrapping=wrapping, optimizer=ADAMW)
            for save, wrapping in (((Save(optimizer=True),), WrappingPlan()), ((Reload(), Save(optimizer=True)), None))),
          source="torch.optim.Optimizer.state", needs={"unused_gradient_is_none"}),
    saved("optim_state.steps_apart", "Parameters that were stepped a different number of times keep their numbers of steps.",
          cases("conditional", *iteration(0, usage=_ONE), *iterations(2, first=1, usage=_ALL), Reload(), Observe(),
                *iterations(2, first=3, usage=_ALL), optimizer=ADAMW, freeze=("never.*",)),
          source="torch.optim.Adam, step", needs={"unused_gradient_is_none"}),
    saved("optim_state.further_entries", "What an optimizer keeps besides the usual moments is saved and loaded.",
          cases("mlp uneven", *iteration(0, scale=4.0), *iteration(1), Reload(), Observe(), *iterations(2, first=2),
                optimizer=OptimizerSpec("adamw", {**ADAMW.arguments, "amsgrad": True})),
          source="torch.optim.AdamW, amsgrad"),
    saved("optim_state.further_numbers", "Numbers that an optimizer keeps besides the count of steps are saved and loaded.",
          cases("mlp uneven", *iterations(2), Reload(), Observe(), *iterations(2, first=2),
                dtype="float32", optimizer=OptimizerSpec("nadam", {"lr": 0.05, "eps": 1e-3, "momentum_decay": 0.1})),
          source="torch.optim.NAdam, mu_product"),
    saved("optim_state.without_state", "An optimizer that keeps no state can be saved and loaded, with its learning rate.",
          cases("mlp", *iteration(0), SetLr(0.02), Reload(), *iteration(1), optimizer=PLAIN_SGD),
          source="torch.optim.SGD without momentum"),
    saved("optim_state.repeatedly", "Saving and loading after every step does not change training.",
          cases("mlp", *iteration(0), Reload(), *iteration(1), Reload(), micro_batch(2), Step(), forward(3), optimizer=ADAMW)),
    saved("optim_state.frozen_later", "Parameters that were frozen since they were stepped keep their state when it is saved.",
          cases("mlp", *iteration(0), Freeze(("layers.0.*",)), Save(optimizer=True), *iteration(1), Restore(), Observe(),
                Thaw(("*",)), *iteration(2), optimizer=ADAMW), source="torch.optim.Optimizer.state_dict"),
    saved("optim_state.frozen_parameters", "Frozen parameters have no optimizer state, and loading gives them none.",
          cases("frozen_body", *iterations(2), Reload(), Observe(), *iteration(2), optimizer=ADAMW),
          source="pytorch PR 76671"),
    saved("optim_state.strided_parameters", "Loaded state belongs to the same elements, whatever the strides of a weight.",
          cases("strided", *iterations(2), Reload(), Observe(), *iteration(2), optimizer=ADAMW),
          source="https://github.com/NVIDIA/physicsnemo/pull/1597"),
    saved("optim_state.shared_parameters", "A shared parameter has one optimizer state.",
          cases("tied_within", *iterations(2), Reload(), Observe(), *iteration(2), optimizer=ADAMW),
          source="pytorch issue 128011, PR 128685"),
)  # fmt: skip
"""In each form of the model's state."""
