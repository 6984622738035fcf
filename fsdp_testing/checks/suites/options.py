"""Options that change no number: with each of them training is what it is without.

Which options an implementation has it says by its claims (`fsdp_testing.cases.records.capabilities.SETTINGS`).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import nn

from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.cases.models import MODELS
from fsdp_testing.cases.operations import EditFullParameters, Reload
from fsdp_testing.cases.records import (
    Case,
    Observe,
    Operation,
    PolicySpec,
    RankObservation,
    Step,
    WrappingPlan,
    ZeroGrad,
)
from fsdp_testing.checks.suites.check import ADAMW, HYBRID, MOMENTUM, PLAIN_SGD, Place, Suite
from fsdp_testing.checks.suites.comm_hooks import expect_scaled
from fsdp_testing.checks.suites.schedules import accumulated, forward, iteration, micro_batch, no_sync_batch
from fsdp_testing.judging.case_runner import RunMode
from fsdp_testing.oracle import models, oracle, rank_jobs
from fsdp_testing.oracle.execute import RankProgram
from fsdp_testing.oracle.quantities import Expectation
from fsdp_testing.oracle.replay import Replay
from fsdp_testing.ranks.pool import Failed
from fsdp_testing.ranks.pool.world import current_world

_EVEN = {4: ((2, 2),), 2: ((2, 1),)}
_PROGRAM = (*accumulated(0, 1), Observe(), Step(), ZeroGrad(), *iteration(2), forward(3))

SUITE = Suite(source="what the documentation of the option says")


def _plan(model: str, *settings: str) -> WrappingPlan:
    return WrappingPlan(MODELS[model].units, settings=settings)


def _trained(setting: str, place: Place) -> Iterable[Case]:
    yield place.case("mlp", *_PROGRAM, wrapping=_plan("mlp", setting), optimizer=PLAIN_SGD)


for name, meaning in (
    ("static_graph", "A graph that is promised to stay the same is reduced like any other, local micro-batches first."),
    ("gradient_views", "Gradients that are views of buckets add up like any others."),
    ("small_buckets", "How many gradients one message holds is no matter to the numbers."),
    ("sum_reduction", "A sum that is divided afterwards is the mean."),
    ("kept_after_backward", "Parameters that stay whole between micro-batches are new after the step."),
    ("partial_reshard", "Parameters that stay sharded over fewer ranks after forward are gathered for backward."),
    ("last_dimension", "Shards of the last dimension are put together along it."),
    ("default_device", "A model is trained on the device where it is if none is named."),
):
    SUITE.add(f"options.{name}", meaning, partial(_trained, name), needs={"accumulate_without_no_sync"})


@SUITE.check(
    "options.divide_factor",
    mode=RunMode(expect=expect_scaled, expect_arguments=(0.5,)),
    source="pytorch issue 155903",
)
def _divided(place: Place) -> Iterable[Case]:
    """Gradients are divided by the number that is given by hand, in every dtype."""
    for dtype in ("float64", "float32"):
        program = (micro_batch(0), Observe(), ZeroGrad(), *accumulated(1, 2), Observe())
        yield place.case("mlp", *program, wrapping=_plan("mlp", "divide_factor"), dtype=dtype)


@SUITE.check("options.default_groups", needs={"hybrid"}, strategies=HYBRID, meshes=_EVEN, source="pytorch issue 154888")
def _default_groups(place: Place) -> Iterable[Case]:
    """Groups of hybrid sharding that the implementation chooses average over all ranks."""
    plan = WrappingPlan(policy=PolicySpec("always"), settings=("default_groups",))
    yield place.case("mlp", micro_batch(0), Observe(), Step(), wrapping=plan, optimizer=PLAIN_SGD)


@SUITE.check("options.own_state", source="torch.distributed.fsdp.FullyShardedDataParallel.optim_state_dict")
def _own_state(place: Place) -> Iterable[Case]:
    """Training goes on from a state that the implementation's own methods saved, model and optimizer."""
    program = (*iteration(0), Reload(), *iteration(1))
    yield place.case("mlp", *program, wrapping=_plan("mlp", "own_state"), optimizer=ADAMW)


class _PartlyOptimized(RankProgram):
    """A program whose optimizer has the first parameters only."""

    def build_optimizer(self) -> None:
        self.optimizer = self.adapter.build_optimizer(self.model, partial(_over_the_first, self.case))


class _PartlyReplayed(Replay):
    """The oracle's run of it."""

    def build_optimizer(self) -> None:
        self.optimizer = _over_the_first(self.case, self.parameters.values())


def _over_the_first(case: Case, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return models.build_optimizer(case, list(parameters)[:2])


def run_partly_optimized(adapter: Adapter, case: Case, observe_all: bool) -> RankObservation | Failed:
    """Run the case with an optimizer over its first parameters.

    Collectives: those of the implementation; every rank of the world runs the same call.
    """
    return rank_jobs.run_program(_PartlyOptimized(case, adapter, current_world().rank), observe_all)


def expect_partly_optimized(case: Case, observe_all: bool) -> Expectation:
    """Return what the case gives so."""
    with rank_jobs.no_warnings():
        return oracle.expect_free(
            case, observe_all=observe_all, make=lambda disturbance: _PartlyReplayed(case, disturbance=disturbance)
        )


@SUITE.check(
    "options.own_state_of_a_part",
    source="pytorch PR 76671",
    # With flat parameters the first one is not that of the model.
    needs={"own_state", "frozen_mixed_unit"},
    mode=RunMode(run_partly_optimized, expect=expect_partly_optimized),
)
def _own_state_of_a_part(place: Place) -> Iterable[Case]:
    """An optimizer that has a part of the parameters is saved and loaded, too."""
    # One unit, of which the optimizer has a part; it would clear the gradients of its own parameters only.
    program = (micro_batch(0), Step(), Reload(), micro_batch(1), Step())
    yield place.case("mlp", *program, wrapping=WrappingPlan(settings=("own_state",)), optimizer=MOMENTUM)


@SUITE.check("options.offloaded_state", source="pytorch issue 188989")
def _offloaded(place: Place) -> Iterable[Case]:
    """Parameters that are gathered on the CPU can be edited and saved."""
    for access in (EditFullParameters(("*",), 0.5, writeback=False), Reload(optimizer=False)):
        program: tuple[Operation, ...] = (*iteration(0), access, *iteration(1))
        yield place.case("mlp", *program, wrapping=_plan("mlp", "offloaded_state"), optimizer=PLAIN_SGD)


@SUITE.check(
    "options.late_all_reduce",
    needs={"hybrid"},
    strategies=HYBRID,
    meshes=_EVEN,
    source="torch.distributed.fsdp.FSDPModule.set_requires_all_reduce",
)
def _late(place: Place) -> Iterable[Case]:
    """Micro-batches that are reduced over the replicas by a later one count once."""
    yield place.case("mlp", *_PROGRAM, wrapping=_plan("mlp", "late_all_reduce"), optimizer=PLAIN_SGD)


@SUITE.check(
    "options.late_all_reduce_cleared",
    needs={"hybrid"},
    strategies=HYBRID,
    meshes=_EVEN,
    source="torch.optim.Optimizer.zero_grad",
)
def _late_cleared(place: Place) -> Iterable[Case]:
    """Gradients that are cleared while they await the replicas leave no trace."""
    program = (no_sync_batch(0), ZeroGrad(), micro_batch(1), Observe(), Step())
    yield place.case("mlp", *program, wrapping=_plan("mlp", "late_all_reduce"), optimizer=PLAIN_SGD)
