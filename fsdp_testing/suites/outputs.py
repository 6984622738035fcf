"""Outputs other than one fresh tensor: containers, objects, views, intermediate results."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_testing.records import Case
from fsdp_testing.suites.check import Check, Place
from fsdp_testing.suites.schedules import iterations
from fsdp_testing.zoo import MODELS


def _containers(place: Place) -> Iterable[Case]:
    for container in MODELS["containers"].arguments["container"]:
        yield place.case("containers", *iterations(2), arguments={"container": container})


def _opaque(place: Place) -> Iterable[Case]:
    yield place.case("opaque_output", *iterations(2))


def _bypass(place: Place) -> Iterable[Case]:
    for bypass in (True, False):
        yield place.case("cached_intermediate", *iterations(2), arguments={"bypass": bypass})


def _view(place: Place) -> Iterable[Case]:
    yield place.case("view_output", *iterations(2))


CHECKS = (
    Check(
        "outputs.containers",
        "Units that return tuples, lists, dicts, named tuples or dataclasses train as in one process.",
        "pytorch issue 77812; PR 173415, 174692",
        _containers,
        frozenset({"container_outputs"}),
    ),
    Check(
        "outputs.opaque_objects",
        "Units that return objects of a user's class train as in one process.",
        "pytorch PR 173415",
        _opaque,
        frozenset({"opaque_outputs"}),
    ),
    Check(
        "outputs.bypassed",
        "A loss may use what a unit kept instead of what it returned.",
        "pytorch issue 173709, PR 174829",
        _bypass,
        frozenset({"loss_bypasses_output"}),
    ),
    Check(
        "outputs.views_changed_in_place",
        "The caller may change a unit's output in place, also where it is a view.",
        "pytorch issue 181832, PR 181850",
        _view,
        frozenset({"inplace_on_output"}),
    ),
)
