"""Where the first values come from: rank 0, or what initialises a module that is on the meta device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fsdp_testing.cases.models import MODELS
from fsdp_testing.cases.records import Case, Observe, WrappingPlan
from fsdp_testing.checks.suites.check import ADAMW, Place, Suite
from fsdp_testing.checks.suites.schedules import iterations

SUITE = Suite(source="https://pytorch.org/docs/stable/fsdp.html")


def _cases(place: Place, *models: str, **starts: Any) -> Iterable[Case]:
    for model in models:
        units = MODELS[model].units
        for plan in (WrappingPlan(units, **starts), WrappingPlan(**starts)) if units else (WrappingPlan(**starts),):
            yield place.case(model, Observe(), *iterations(2), wrapping=plan, optimizer=ADAMW)


@SUITE.check("construction.rank_0_parameters")
def _parameters(place: Place) -> Iterable[Case]:
    """Ranks that begin with different parameters are given those of rank 0, nested units and frozen ones included."""
    yield from _cases(place, "deep_nest", "uneven", sync_module_states=True)
    plan = WrappingPlan(MODELS["mlp"].units, sync_module_states=True)
    yield place.case("mlp", Observe(), *iterations(2), wrapping=plan, freeze=("layers.1.*",))


@SUITE.check("construction.rank_0_buffers")
def _buffers(place: Place) -> Iterable[Case]:
    """Ranks that begin with different buffers, saved or not and of every dtype, are given those of rank 0."""
    yield from _cases(place, "buffers", "batch_norm", sync_module_states=True)


@SUITE.check("construction.meta_parameters")
def _meta(place: Place) -> Iterable[Case]:
    """Modules on the meta device are initialised by the user's function, and train as if they had never been there."""
    yield from _cases(place, "deep_nest", "uneven", meta_init=True)
    plan = WrappingPlan(MODELS["mlp"].units, meta_init=True)
    yield place.case("mlp", Observe(), *iterations(2), wrapping=plan, freeze=("layers.1.*",))


@SUITE.check("construction.meta_buffers")
def _meta_buffers(place: Place) -> Iterable[Case]:
    """Buffers on the meta device are initialised with the parameters of their module."""
    yield from _cases(place, "batch_norm", meta_init=True)


@SUITE.check("construction.meta_then_rank_0")
def _meta_then_rank_0(place: Place) -> Iterable[Case]:
    """What each rank initialises otherwise is rank 0's in the end."""
    yield from _cases(place, "deep_nest", "uneven", meta_init=True, sync_module_states=True)


@SUITE.check("training.optimizer_state", source="torch.optim.Optimizer.state", needs={"optimizer_pieces"})
def _optimizer_state(place: Place) -> Iterable[Case]:
    """The optimizer's state of every parameter is that of one process after each step."""
    yield place.case("uneven", *(op for seed in range(2) for op in (*iterations(1, seed), Observe())), optimizer=ADAMW)
