"""Parts of a wrapped model in users' hands: replaced by others, called by themselves."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.cases.operations import user_code
from fsdp_testing.cases.records import BuildOptimizer, Case, Observe, RankObservation, Step, WrappingPlan
from fsdp_testing.checks.suites.check import PLAIN_SGD, Place, Suite
from fsdp_testing.checks.suites.schedules import forward, iteration, micro_batch
from fsdp_testing.judging.case_runner import RunMode
from fsdp_testing.oracle import oracle, rank_jobs
from fsdp_testing.oracle.comparison import Comparison
from fsdp_testing.oracle.disturbance import Disturbance
from fsdp_testing.oracle.execute import RankProgram
from fsdp_testing.oracle.quantities import Expectation
from fsdp_testing.oracle.replay import Replay, ReplayPoint
from fsdp_testing.ranks.pool import Failed
from fsdp_testing.ranks.pool.world import current_world

_PART, _FACTOR = "layers.0", 0.5
_MODULE, _PARAMETERS, _ALONE = "module replaced", "parameters replaced", "called alone"
"""Labels of the observations before which something happens to the part."""


class PartsProgram(RankProgram):
    """A program that replaces a part of its model, or calls it alone, before a marked point is observed."""

    def observe(self, label: str) -> None:
        """Do what the label says, then take a snapshot."""
        if label in (_MODULE, _PARAMETERS):
            other = self.plain_part(_PART) if label == _MODULE else None
            user_code.scale(other.parameters() if other is not None else (), _FACTOR)
            user_code.substitute(self.model, _PART, other, _FACTOR)
        if label == _ALONE:
            weight = self.plain_part(_PART).get_parameter("weight")
            with torch.no_grad():
                user_code.part(self.model, _PART)(torch.ones_like(weight)[:2])
        super().observe(label)


def run_parts(adapter: Adapter, case: Case, observe_all: bool) -> RankObservation | Failed:
    """Run the case as `PartsProgram` does.

    Collectives: those of the implementation; every rank of the world runs the same call.
    """
    return rank_jobs.run_program(PartsProgram(case, adapter, current_world().rank), observe_all)


class _Replacing(Replay):
    """The oracle's run: what takes a part's place has its numbers times a factor."""

    def _observed(self, index: int, *, pending: bool) -> ReplayPoint:
        label = getattr(self.case.program[index], "label", "") if index < len(self.case.program) else ""
        if label in (_MODULE, _PARAMETERS):
            self.scale((f"{_PART}.*",), _FACTOR)
        return super()._observed(index, pending=pending)


def expect_replaced(case: Case, observe_all: bool) -> Expectation:
    """Return what the case gives if the part is replaced."""

    def make(disturbance: Disturbance) -> Replay:
        return _Replacing(case, disturbance=disturbance)

    with rank_jobs.no_warnings():
        return oracle.expect_free(case, observe_all=observe_all, make=make)


_BY_OUTPUTS = Comparison(ignore=(f"{_PART}.*",))
"""What an adapter shows of a part that gave way may be the part itself: what the model computes decides."""

SUITE = Suite()


@SUITE.check(
    "parts.module_replaced",
    source="pytorch PR 87837",
    needs={"modules_replaced"},
    comparison=_BY_OUTPUTS,
    mode=RunMode(run_parts, expect=expect_replaced),
)
def _module_replaced(place: Place) -> Iterable[Case]:
    """A module that takes another one's place before the first forward is trained like the others."""
    program = (Observe(_MODULE), BuildOptimizer(), micro_batch(0), Step(), forward(1))
    yield place.case("mlp", *program, wrapping=WrappingPlan(), optimizer=PLAIN_SGD)


@SUITE.check(
    "parts.parameters_replaced",
    source="pytorch issue 132721",
    needs={"parameters_replaced"},
    comparison=_BY_OUTPUTS,
    mode=RunMode(run_parts, expect=expect_replaced),
)
def _parameters_replaced(place: Place) -> Iterable[Case]:
    """A parameter that takes another one's place between forwards is what the next forward computes with."""
    yield place.case("mlp", forward(0, "no_grad"), Observe(_PARAMETERS), forward(1))


@SUITE.check(
    "parts.called_alone",
    source="pytorch PR 90862, 87900",
    needs={"unit_alone", "nested_wrapping"},
    mode=RunMode(run_parts),
)
def _called_alone(place: Place) -> Iterable[Case]:
    """A unit that is called by itself, before the model and between iterations, changes nothing."""
    yield place.case("mlp", Observe(_ALONE), *iteration(0), Observe(_ALONE), *iteration(1))
