"""Runs that check the state of an optimizer: what is refused, entries of users, groups, the order of parameters."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from fsdp_testing.cases.records import Batch, Case
from fsdp_testing.checks.suites.programs import review_remarks
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
        holders = self.optimizer.param_groups if label in OF_GROUPS else [kept] if lone else list(kept.values())
        for entries in holders:
            entries[name] = copy.deepcopy(value)
        with self._inside():
            saved = adapter.full_optimizer_state(self.model, self.optimizer)
            adapter.finish(self.model)
            self.rebuild({})
            self.build_optimizer()
            adapter.load_full_optimizer_state(self.model, self.optimizer, saved)
            again = adapter.full_optimizer_state(self.model, self.optimizer)
        if label in OF_GROUPS:
            groups = self.optimizer.param_groups
            got = {repr(group.get(name)) for each in (groups, again["param_groups"]) for group in each}
            if got != {repr(value)}:
                yield f"a group that is loaded has {', '.join(sorted(got - {repr(value)}))}, expected {value!r}"
            return
        for fqn, _ in [("", None)] if lone else self.plain_part("").named_parameters():
            for when, state in (("saved", saved), ("loaded", again)):
                entries = state["state"] if lone else state["state"].get(fqn, {})
                # A number in a tensor may be loaded in the dtype of the parameter, as torch's optimizers load it.
                if not same_values(*map(_in_float64, (entries.get(name), value))):
                    yield f"{fqn or 'state'} has {entries.get(name)!r} in the {when} state, expected {value!r}"


def _in_float64(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and not value.dim() else value


OF_NO_PARAMETER = "an entry of no parameter"
OF_GROUPS = frozenset({"a factor of groups"})
ENTRIES: Mapping[str, Callable[[torch.dtype], Any]] = {
    "a number": lambda dtype: 7,
    "NaN": lambda dtype: math.nan,
    "a list": lambda dtype: [0.5, 1.5],
    # Of a shape that no parameter has.
    "a tensor of another shape": lambda dtype: torch.tensor([[[1.0, math.nan], [0.0, math.inf]]], dtype=dtype),
    "a whole number that float32 cannot hold": lambda dtype: torch.tensor(2**24 + 1),
    **dict.fromkeys(OF_GROUPS, lambda dtype: 0.125),
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


class RatesInTensors(RemarkingProgram):
    """Loads a state whose learning rate is a tensor, changes that of the optimizer in place, and looks at the state."""

    quantity = "optimizer state that was loaded"

    def statements(self) -> Iterator[str]:
        """Yield the rates that changed with the optimizer's."""
        adapter = self.adapter
        if self.optimizer is None:
            return  # a shortened case
        with self._inside():
            saved = adapter.full_optimizer_state(self.model, self.optimizer)
        before = [float(group["lr"]) for group in saved["param_groups"]]
        with self._inside():
            adapter.load_full_optimizer_state(self.model, self.optimizer, saved)
        for group in self.optimizer.param_groups:
            group["lr"].mul_(0.5)
        after = [float(group["lr"]) for group in saved["param_groups"]]
        if after != before:
            yield f"has learning rates of {after}, expected {before}: those of the optimizer are its tensors. Copy them"


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
RATES_IN_TENSORS = RunMode(rank_jobs.run_as, (RatesInTensors, {}), review=review_remarks)
