"""Streams: on a device, nothing is used on one stream before another one is done with it.

Ranks on the CPU get streams and events that are recorded; what nobody waits for is a race on a device, whatever the numbers
are here. The numbers are compared besides, and must hold first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fsdp_testing.adapters import registry
from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.cases.models import MODELS
from fsdp_testing.cases.operations import UnshardFirst
from fsdp_testing.cases.records import (
    Batch,
    Case,
    Clip,
    EditFullParameters,
    FailureKind,
    Finding,
    MixedPrecisionSpec,
    RankObservation,
    Reload,
    Step,
    WrappingPlan,
    ZeroGrad,
)
from fsdp_testing.checks.suites.check import ADAMW, HYBRID, Place, Suite
from fsdp_testing.checks.suites.schedules import accumulated, forward, iteration, iterations
from fsdp_testing.errors import InvalidImplementation
from fsdp_testing.judging.case_runner import RunMode
from fsdp_testing.judging.checkers.explain import finding
from fsdp_testing.oracle import rank_jobs
from fsdp_testing.oracle.comparison import Comparison
from fsdp_testing.oracle.execute import RankProgram
from fsdp_testing.oracle.quantities import Expectation
from fsdp_testing.ranks.pool import Failed
from fsdp_testing.ranks.pool.world import current_world
from fsdp_testing.ranks.streams.observation import observe
from fsdp_testing.ranks.streams.races import Race, races

_MOST_RACES = 10


@dataclass(frozen=True, slots=True)
class StreamObservation(RankObservation):
    """What a rank reports whose streams were recorded: the first races, and how many there are."""

    races: tuple[Race, ...] = ()
    race_count: int = 0


def run_observed(adapter: Adapter, case: Case, observe_all: bool) -> RankObservation | Failed:
    """Run the case on this rank with its streams recorded.

    Collectives: those of the implementation; every rank of the world runs the same call.

    Raises:
        InvalidImplementation: The adapter claims `streams`, and nothing ran on a second stream.
    """
    program = RankProgram(case, registry.adapter_of(adapter), current_world().rank)
    # Late copies and garbage are writes that no device makes.
    program.late = program.garbage = False
    with observe() as history:
        result = rank_jobs.run_program(program, observe_all)
    if isinstance(result, Failed):
        return result
    if len(history.streams) < 2 and current_world().size > 1:
        raise InvalidImplementation(
            f"{adapter.name}: expected work on several streams, got work on the default stream alone, so that nothing is known "
            "of its streams. Ask torch.get_device_module(device) for Stream, Event and current_stream when the model first "
            "runs; or do not claim `streams`."
        )
    pairs = races(history)
    return result.extended(StreamObservation, races=tuple(pairs[:_MOST_RACES]), race_count=len(pairs))


def no_races(case: Case, ranks: Sequence[RankObservation], _expected: Expectation) -> Finding | None:
    """Return the first race of the first rank that has one."""
    racing = [rank for rank in ranks if isinstance(rank, StreamObservation) and rank.races]
    if not racing:
        return None
    first = racing[0]
    more = f" ({first.race_count - 1} more on this rank)" if first.race_count > 1 else ""
    race = first.races[0]
    statement = f"{race.summary}, on rank {first.rank}{more}"
    return finding(
        case,
        FailureKind.RACE,
        "streams",
        len(case.program),
        statement,
        ranks=tuple(rank.rank for rank in racing),
        detail="\n".join(str(each) for each in first.races),
    )


SUITE = Suite(
    needs={"streams"},
    source="PyTorch FSDP, VLDB 2023, section 3.3; pytorch PR 177319",
    mode=RunMode(run_observed, review=no_races),
)


@SUITE.check("streams.training")
def _trained(place: Place) -> Iterable[Case]:
    """Two iterations: gathers wait for the step before, compute for gathers, reductions for gradients, the step for both."""
    for model in ("mlp", "deep_nest"):
        yield place.case(model, *iterations(2), optimizer=ADAMW)


@SUITE.check("streams.accumulation")
def _accumulated(place: Place) -> Iterable[Case]:
    """Micro-batches inside no_sync and outside, gradients cleared between."""
    yield place.case("deep_nest", *accumulated(0, 1), Step(), ZeroGrad(), *accumulated(2, 3), Step())


@SUITE.check("streams.mixed_precision", comparison=Comparison(lockstep=True))
def _mixed_precision(place: Place) -> Iterable[Case]:
    """Casts before gathers and around reductions."""
    yield place.case("mlp", *iterations(2), dtype="float32", precision=MixedPrecisionSpec("bfloat16", "float32"))


@SUITE.check("streams.clipping")
def _clipped(place: Place) -> Iterable[Case]:
    """Clipping reads gradients after they are reduced, and the step what clipping left."""
    yield place.case("mlp", *iteration(0, Clip(0.1)), *iteration(1, Clip(0.1)), dtype="float32")


@SUITE.check("streams.forward_only")
def _forward_only(place: Place) -> Iterable[Case]:
    """Forward passes without backward, between iterations."""
    yield place.case("deep_nest", forward(5), *iteration(0), forward(6, "no_grad"), *iteration(1))


@SUITE.check("streams.prefetch")
def _prefetched(place: Place) -> Iterable[Case]:
    """Units gathered ahead, in forward and in backward."""
    for backward in ("pre", "post"):
        ahead = WrappingPlan(MODELS["deep_nest"].units, forward_prefetch=True, backward_prefetch=backward)
        yield place.case("deep_nest", *iterations(2), wrapping=ahead)


@SUITE.check("streams.summon")
def _summoned(place: Place) -> Iterable[Case]:
    """Full parameters are edited between iterations, and the next gather waits for the edit."""
    yield place.case("mlp", *iteration(0), EditFullParameters(("*",), 0.5, True), *iteration(1))


@SUITE.check("streams.unshard", needs={"nested_wrapping"})
def _unsharded(place: Place) -> Iterable[Case]:
    """Units gathered by hand, without waiting, before a micro-batch."""
    units = ("", *MODELS["deep_nest"].units)
    yield place.case("deep_nest", *iteration(0), UnshardFirst(Batch(1), units, asynchronous=True), Step(), ZeroGrad())


@SUITE.check("streams.state")
def _saved(place: Place) -> Iterable[Case]:
    """State is saved after a step, loaded into another instance, and trained on."""
    yield place.case("mlp", *iteration(0), Reload("full"), *iteration(1), optimizer=ADAMW)


@SUITE.check(
    "streams.hybrid",
    comparison=Comparison(lockstep=True),
    strategies=HYBRID,
    meshes={4: ((2, 2),), 2: ((1, 2),)},
    needs={"hybrid"},
)
def _hybrid(place: Place) -> Iterable[Case]:
    """The second reduction, over replicas, waits for the first one, and its input is held until it is over."""
    yield place.case("deep_nest", *iterations(2))
    yield place.case("deep_nest", *iterations(2), dtype="float32", precision=MixedPrecisionSpec(None, "bfloat16"))
