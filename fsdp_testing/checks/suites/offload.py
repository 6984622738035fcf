"""CPU offload: where parameters live is no matter to the numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fsdp_testing.cases.records import Case, Clip, Observe, Step, ZeroGrad
from fsdp_testing.checks.suites.check import ADAMW, Place, Suite
from fsdp_testing.checks.suites.schedules import accumulated, iteration, iterations, micro_batch, micro_batches


def _offloaded(case: Case) -> Case:
    return replace(case, cpu_offload=True)


SUITE = Suite()


@SUITE.check("offload.trained", source="torch CPUOffload, CPUOffloadPolicy")
def _trained(place: Place) -> Iterable[Case]:
    """Trains as without offload."""
    for model in ("mlp", "uneven"):
        yield _offloaded(place.case(model, *iterations(3), optimizer=ADAMW))


@SUITE.check("offload.no_sync", source="pytorch issue 98494, PR 100180")
def _accumulated(place: Place) -> Iterable[Case]:
    """Local micro-batches and a reduced one add up."""
    yield _offloaded(place.case("mlp", *accumulated(0, 1), Observe(), Step(), ZeroGrad(), *iteration(2)))


@SUITE.check("offload.without_no_sync", source="pytorch issue 73784, PR 73535", needs={"accumulate_without_no_sync"})
def _reduced(place: Place) -> Iterable[Case]:
    """Reduced micro-batches add up; the later does not replace the earlier."""
    yield _offloaded(place.case("mlp", *micro_batches(0, 1), Observe(), Step()))


@SUITE.check("offload.clipped", source="pytorch PR 86337")
def _clipped(place: Place) -> Iterable[Case]:
    """Gradients on the CPU are clipped."""
    yield _offloaded(place.case("mlp", micro_batch(0), Clip(0.1), Observe(), Step(), dtype="float32"))
