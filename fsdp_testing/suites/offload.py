"""CPU offload: where parameters live is no matter to the numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fsdp_testing.records import Case, Clip, Observe, Step, ZeroGrad
from fsdp_testing.suites.check import ADAMW, Check, Place
from fsdp_testing.suites.schedules import accumulated, iterations, micro_batch, micro_batches

_NEEDS = frozenset({"cpu_offload"})


def _offloaded(case: Case) -> Case:
    return replace(case, cpu_offload=True)


def _trained(place: Place) -> Iterable[Case]:
    for model in ("mlp", "uneven"):
        yield _offloaded(place.case(model, *iterations(3), optimizer=ADAMW))


def _accumulated(place: Place) -> Iterable[Case]:
    yield _offloaded(place.case("mlp", *accumulated(0, 1), Observe(), Step(), ZeroGrad(), *iterations(1, first=2)))


def _reduced(place: Place) -> Iterable[Case]:
    yield _offloaded(place.case("mlp", *micro_batches(0, 1), Observe(), Step()))


def _clipped(place: Place) -> Iterable[Case]:
    yield _offloaded(place.case("mlp", micro_batch(0), Clip(0.1), Observe(), Step(), dtype="float32"))


CHECKS = (
    Check("offload.trained", "Trains as without offload.", "torch CPUOffload, CPUOffloadPolicy", _trained, _NEEDS),
    Check(
        "offload.no_sync",
        "Local micro-batches and a reduced one add up.",
        "pytorch issue 98494, PR 100180",
        _accumulated,
        _NEEDS | {"no_sync"},
    ),
    Check(
        "offload.without_no_sync",
        "Reduced micro-batches add up; the later does not replace the earlier.",
        "pytorch issue 73784, PR 73535",
        _reduced,
        _NEEDS | {"accumulate_without_no_sync"},
    ),
    Check(
        "offload.clipped",
        "Gradients on the CPU are clipped.",
        "pytorch PR 86337",
        _clipped,
        _NEEDS | {"clip_grad_norm"},
    ),
)
