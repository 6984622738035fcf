"""Buffers: every rank's own, computed from its own inputs, neither sharded nor reduced nor lost."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_testing.records import Case, Observe
from fsdp_testing.suites.check import Check, Place
from fsdp_testing.suites.schedules import accumulated, forward, iterations

_NEEDS = frozenset({"buffers"})


def _kept(place: Place) -> Iterable[Case]:
    yield place.case("buffers", Observe(), *iterations(3), forward(9, "eval"))


def _statistics(place: Place) -> Iterable[Case]:
    yield place.case("batch_norm", *iterations(3), Observe())


def _accumulated(place: Place) -> Iterable[Case]:
    for model in ("buffers", "batch_norm"):
        yield place.case(model, *accumulated(0, 1), Observe())


CHECKS = (
    Check(
        "buffers.kept",
        "Saved and unsaved, floating, integer and boolean buffers keep value and dtype and are updated.",
        "pytorch PR 87935",
        _kept,
        _NEEDS | {"forward_only"},
    ),
    Check(
        "buffers.statistics",
        "Batch statistics are those of each rank's own inputs.",
        "torch.nn.BatchNorm1d",
        _statistics,
        _NEEDS,
    ),
    Check(
        "buffers.in_no_sync",
        "Buffers are updated inside no_sync too.",
        "pytorch PR 87935",
        _accumulated,
        _NEEDS | {"no_sync"},
    ),
)
