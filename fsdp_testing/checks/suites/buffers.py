"""Buffers: every rank's own, computed from its own inputs, neither sharded nor reduced nor lost."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_testing.cases.records import Case, Observe
from fsdp_testing.checks.suites.check import Place, Suite
from fsdp_testing.checks.suites.schedules import accumulated, forward, iterations

SUITE = Suite()


@SUITE.check("buffers.kept", source="pytorch PR 87935")
def _kept(place: Place) -> Iterable[Case]:
    """Saved and unsaved, floating, integer and boolean buffers keep value and dtype and are updated."""
    yield place.case("buffers", Observe(), *iterations(3), forward(9, "eval"))


@SUITE.check("buffers.statistics", source="torch.nn.BatchNorm1d")
def _statistics(place: Place) -> Iterable[Case]:
    """Batch statistics are those of each rank's own inputs."""
    yield place.case("batch_norm", *iterations(3), Observe())


@SUITE.check("buffers.in_no_sync", source="pytorch PR 87935")
def _accumulated(place: Place) -> Iterable[Case]:
    """Buffers are updated inside no_sync too."""
    for model in ("buffers", "batch_norm"):
        yield place.case(model, *accumulated(0, 1), Observe())
