"""Hybrid sharding: sharded inside a group, replicated across groups; four ranks."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_testing.records import Case, Clip, Observe, Step, ZeroGrad
from fsdp_testing.suites.check import ADAMW, HYBRID, Place, Suite
from fsdp_testing.suites.schedules import accumulated, iterations, micro_batch, micro_batches

_EVEN = {4: ((2, 2),), 2: ()}
_DEGENERATE = {4: ((4, 1), (1, 4)), 2: ((2, 1), (1, 2))}

SUITE = Suite(needs={"hybrid"}, profile="extended", strategies=HYBRID)


@SUITE.check("hybrid.trained", source="pytorch PR 89915", meshes=_EVEN)
def _trained(place: Place) -> Iterable[Case]:
    """Gradients are averaged over shards and replicas."""
    for model in ("mlp", "uneven"):
        yield place.case(model, *iterations(3), optimizer=ADAMW)


@SUITE.check("hybrid.schedule", source="pytorch PR 125484, 126166", needs={"accumulate_without_no_sync"}, meshes=_EVEN)
def _schedule(place: Place) -> Iterable[Case]:
    """With accumulation and clipping."""
    yield place.case(
        "mlp", *accumulated(0, 1), Observe(), Clip(0.1), Step(), ZeroGrad(), *micro_batches(2, 3), dtype="float32"
    )


@SUITE.check("hybrid.degenerate_groups", source="pytorch issue 154888", meshes=_DEGENERATE)
def _gradients(place: Place) -> Iterable[Case]:
    """Groups of one rank: replicas are still averaged, shards still put together."""
    yield place.case("mlp", micro_batch(0), Observe(), Step())
