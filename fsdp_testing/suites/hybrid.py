"""Hybrid sharding: sharded inside a group, replicated across groups; four ranks."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_testing.records import Case, Clip, Observe, Step, ZeroGrad
from fsdp_testing.suites.check import ADAMW, HYBRID, Check, Place
from fsdp_testing.suites.schedules import accumulated, iterations, micro_batch, micro_batches

_NEEDS = frozenset({"hybrid"})
_EVEN = {4: ((2, 2),), 2: ()}
_DEGENERATE = {4: ((4, 1), (1, 4)), 2: ((2, 1), (1, 2))}


def _trained(place: Place) -> Iterable[Case]:
    for model in ("mlp", "uneven"):
        yield place.case(model, *iterations(3), optimizer=ADAMW)


def _schedule(place: Place) -> Iterable[Case]:
    yield place.case(
        "mlp", *accumulated(0, 1), Observe(), Clip(0.1), Step(), ZeroGrad(), *micro_batches(2, 3), dtype="float32"
    )


def _gradients(place: Place) -> Iterable[Case]:
    yield place.case("mlp", micro_batch(0), Observe(), Step())


CHECKS = (
    Check(
        "hybrid.trained",
        "Gradients are averaged over shards and replicas.",
        "pytorch PR 89915",
        _trained,
        _NEEDS,
        profile="extended",
        strategies=HYBRID,
        meshes=_EVEN,
    ),
    Check(
        "hybrid.schedule",
        "With accumulation and clipping.",
        "pytorch PR 125484, 126166",
        _schedule,
        _NEEDS | {"no_sync", "accumulate_without_no_sync", "clip_grad_norm"},
        profile="extended",
        strategies=HYBRID,
        meshes=_EVEN,
    ),
    Check(
        "hybrid.degenerate_groups",
        "Groups of one rank: replicas are still averaged, shards still put together.",
        "pytorch issue 154888",
        _gradients,
        _NEEDS,
        profile="extended",
        strategies=HYBRID,
        meshes=_DEGENERATE,
    ),
)
