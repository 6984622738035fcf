"""Hybrid sharding: sharded inside a group, replicated across groups; four ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fsdp_testing.adapters import registry
from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.cases.records import Batch, Case, Clip, Observe, RankObservation, Step, ZeroGrad
from fsdp_testing.checks.suites.check import ADAMW, HYBRID, Place, Suite
from fsdp_testing.checks.suites.schedules import accumulated, iterations, micro_batch, micro_batches
from fsdp_testing.judging.case_runner import RunMode
from fsdp_testing.oracle import rank_jobs
from fsdp_testing.oracle.execute import RankProgram
from fsdp_testing.ranks.pool import Failed
from fsdp_testing.ranks.pool.world import current_world

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


class _FirstReplicaEvaluates(RankProgram):
    """Before its program, the ranks of the first replica run a forward that the others do not run."""

    def run_operations(self, *, observe_all: bool = False) -> None:
        if self.rank < self.case.world.mesh_shape[-1]:
            with torch.no_grad():
                self.call(Batch(9))
        super().run_operations(observe_all=observe_all)


def run_after_one_replica(adapter: Adapter, case: Case, observe_all: bool) -> RankObservation | Failed:
    """Run the case on this rank after an evaluation by one replica.

    Collectives: those of the implementation; every rank of the world runs the same call.
    """
    return rank_jobs.run_program(
        _FirstReplicaEvaluates(case, registry.adapter_of(adapter), current_world().rank), observe_all
    )


@SUITE.check(
    "hybrid.one_replica_evaluates",
    source="uneven validation batches per replica: gathers travel inside a shard group only",
    mode=RunMode(run_after_one_replica, besides="the evaluation by one replica"),
    meshes=_EVEN,
    needs={"forward_only"},
)
def _alone(place: Place) -> Iterable[Case]:
    """One replica evaluates alone, then all of them train."""
    yield place.case("mlp", *iterations(2))
