"""Outputs other than one fresh tensor: containers, objects, views, intermediate results."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_testing.cases.models import MODELS
from fsdp_testing.cases.records import Case
from fsdp_testing.checks.suites.check import Place, Suite
from fsdp_testing.checks.suites.schedules import iterations

SUITE = Suite()


@SUITE.check("outputs.containers", source="pytorch issue 77812; PR 173415, 174692")
def _containers(place: Place) -> Iterable[Case]:
    """Units that return tuples, lists, dicts, named tuples or dataclasses train as in one process."""
    for container in MODELS["containers"].arguments["container"]:
        yield place.case("containers", *iterations(2), arguments={"container": container})


@SUITE.check("outputs.opaque_objects", source="pytorch PR 173415")
def _opaque(place: Place) -> Iterable[Case]:
    """Units that return objects of a user's class train as in one process."""
    yield place.case("opaque_output", *iterations(2))


@SUITE.check("outputs.bypassed", source="pytorch issue 173709, PR 174829")
def _bypass(place: Place) -> Iterable[Case]:
    """A loss may use what a unit kept instead of what it returned."""
    for bypass in (True, False):
        yield place.case("cached_intermediate", *iterations(2), arguments={"bypass": bypass})


@SUITE.check("outputs.views_changed_in_place", source="pytorch issue 181832, PR 181850")
def _view(place: Place) -> Iterable[Case]:
    """The caller may change a unit's output in place, also where it is a view."""
    yield place.case("view_output", *iterations(2))
