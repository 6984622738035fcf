"""The ranks' work on one state: train and save, or load into a model and an optimizer with other values; then one more step."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.cases.records import Case, CaseRecord, OptimizerSpec, RankObservation
from fsdp_testing.judging.batch import run_each
from fsdp_testing.oracle import optimizers
from fsdp_testing.oracle.execute import RankProgram
from fsdp_testing.oracle.ways import Source, Trained, save
from fsdp_testing.ranks.pool import Failed
from fsdp_testing.ranks.pool.world import World, current_world
from fsdp_testing.search.checkpoints.axes import SUBJECTS, Layout, Subject, case_of, further, schedule_of

Settings = Mapping[str, Mapping[str, Any]]
"""By parameter, the settings of its group: learning rate and the like."""


class Stage(StrEnum):
    """The stage that a rank reached."""

    TRAINING = "training"
    SAVING = "saving"
    LOADING = "loading"
    FURTHER_STEP = "further step"


@dataclass(frozen=True, slots=True)
class Item:
    """One state to save or to load.

    Attributes:
        subject: One of `SUBJECTS`.
        way: One of `WAYS`.
        folder: The directory of the state.
        saver: Implementation and layout that saves it.
        loads: Load it; else train and save it.
        optimizer: Save or load the optimizer's state too.
    """

    subject: str
    way: str
    folder: str
    saver: str
    loads: bool
    optimizer: bool = True


@dataclass(frozen=True, slots=True)
class Beside:
    """A rank's state besides model and optimizer.

    Attributes:
        settings: Settings of the groups.
        schedule: Schedule of the learning rate; None if the subject has none.
        random: State of torch's generator on the CPU; None likewise.
    """

    settings: Settings
    schedule: Mapping[str, Any] | None = None
    random: Any = None


@dataclass(frozen=True, slots=True)
class StateObservation(RankObservation):
    """What a rank also reports.

    Attributes:
        beside: One for each snapshot. Of a saver: right before saving, right after it, and after the further step; of a
            loader: right after loading, and after the further step.
        stage: The stage in which an error was raised.
    """

    beside: tuple[Beside, ...] = ()
    stage: str = ""


def run_items(adapter: Adapter, layout: Layout, items: Sequence[Item], directory: str) -> int | Failed:
    """Save or load one state after the other, up to the first that leaves the ranks at different stages.

    Returns:
        How many items were begun; a `Failed` if the ranks cannot go on together after the last one.

    Collectives: those of the implementation; every rank of the world runs the same call.
    """
    world = current_world()

    def run(index: int) -> tuple[CaseRecord, weakref.ref[nn.Module]]:
        program = CheckpointProgram(items[index], layout, adapter, world)
        observation = program.run()
        # After an exception there may be no model to finish.
        with suppress(*([] if observation.error is None else [Exception])):
            adapter.finish(program.model)
        return CaseRecord(index, observation), weakref.ref(program.model)

    return run_each(len(items), run, directory)


class CheckpointProgram(RankProgram):
    """One item on one rank."""

    def __init__(self, item: Item, layout: Layout, adapter: Adapter, world: World) -> None:
        self.item = item
        self.subject = SUBJECTS[item.subject]
        self.stage = Stage.LOADING if item.loads else Stage.TRAINING
        self.beside: list[Beside] = []
        self.schedule: Any = None
        super().__init__(case_of(self.subject, layout, adapter), adapter, world.rank)

    def run(self, *, observe_all: bool = False) -> StateObservation:
        """Run the item; also report the stage and the entries beside the state. Collectives: as for `RankProgram.run`."""
        observation = super().run(observe_all=observe_all)
        return observation.extended(StateObservation, beside=tuple(self.beside), stage=str(self.stage))

    def _run(self, *, observe_all: bool) -> None:
        if self.item.loads:
            self._load()
        else:
            super()._run(observe_all=observe_all)
            if self.schedule is not None:
                self.schedule.step()
                torch.rand(1 + self.rank)  # so that no two ranks draw the same numbers from now on
            self.results, self.snapshots, self.index = [], [], -1
            self._report("before saving")
            self._save()
        self.index = -1
        self._report("state")
        self.stage, self.case = Stage.FURTHER_STEP, further(self.subject, self.case)
        self.run_operations()
        if self.schedule is not None:
            self.schedule.step()
        self.beside.append(self._beside())

    def _report(self, label: str) -> None:
        self.beside.append(self._beside())
        self.observe(label)

    def _beside(self) -> Beside:
        settings = settings_of(self.adapter, self.model, self.optimizer)
        if self.schedule is None:
            return Beside(settings)
        return Beside(settings, copy.deepcopy(self.schedule.state_dict()), torch.get_rng_state())

    def _save(self) -> None:
        self.stage = Stage.SAVING
        trained = Trained(self.model, self.optimizer if self.item.optimizer else None)
        if self.schedule is not None:
            random = {f"rank {self.rank}": torch.get_rng_state()}
            trained = replace(trained, beside={"schedule": self.schedule.state_dict(), "random": random})
        with self._inside():
            save(self.item.way, self.adapter, trained, Path(self.item.folder))

    def _load(self) -> None:
        """Load as a user does: into what was built from another seed and with other settings."""
        source = Source(self.item.way, Path(self.item.folder))
        self.case = replace(self.case, optimizer=self.subject.fresh)
        self.rebuild({})
        if self.subject.built_first:
            self.build_optimizer()
        with self._inside():
            source.load_model(self.adapter, self.model)
        if not self.subject.built_first:
            self.build_optimizer()
        if self.item.optimizer:
            with self._inside():
                source.load_optimizer(self.adapter, self.model, self.optimizer)
        if self.schedule is not None:
            self.schedule.load_state_dict(source.beside("schedule"))
            random = source.beside("random")
            torch.set_rng_state(random[f"rank {self.rank % len(random)}"])  # as many as were saved, repeated

    def build_optimizer(self) -> None:
        first = dict(self.subject.first)
        if self.item.loads and first:
            first = dict.fromkeys(first, 0.3)  # an entry that is not loaded shows
        with self._inside():
            names = {id(parameter): name for name, parameter in self.adapter.named_parameters(self.model)}
            make = partial(grouped, self.case, names, first)
            self.optimizer = self.adapter.build_optimizer(self.model, make)
        self.schedule = schedule_of(self.subject, self.optimizer)


def grouped(case: Case, names: Mapping[int, str], first: Mapping[str, Any], parameters: Any) -> Any:
    """Build the case's optimizer; the parameters of `first` get a separate group if that group has settings."""
    parameters = list(parameters)
    if not first:
        return optimizers.build_optimizer(case, parameters)
    inside = [p for p in parameters if names[id(p)].startswith("first.")]
    others = [p for p in parameters if not names[id(p)].startswith("first.")]
    groups: Any = [{"params": inside, **first}, {"params": others}]
    return optimizers.build_optimizer(case, groups)


def settings_of(adapter: Adapter, model: nn.Module, optimizer: Any) -> dict[str, dict[str, Any]]:
    """Return the settings of every parameter's group, by the parameter's name."""
    names = {id(parameter): name for name, parameter in adapter.named_parameters(model)}
    return {
        names.get(id(parameter), ""): {
            key: value for key, value in group.items() if key not in ("params", "param_names")
        }
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def fresh_case(subject: Subject, case: Case, *, loaded: bool) -> Case:
    """Return the case of the further step with the optimizer that makes it."""
    spec: OptimizerSpec = subject.optimizer if loaded else subject.fresh
    return replace(further(subject, case), optimizer=spec)
