"""Every exhibit is caught by each check that its label names, and the sound reference passes the same checks."""

from __future__ import annotations

import pytest

from fsdp_testing.checks.suites import CHECKS
from fsdp_testing.errors import InvalidArgument
from fsdp_testing.judging.concurrency import Shared
from fsdp_testing.museum.collection import PATHS, exhibits
from fsdp_testing.museum.tour import SOUND_KEPT, Sound, chosen, tour

SOUND: Sound = Shared(SOUND_KEPT)
"""The sound reference is judged once for each check, whichever exhibits it is the counterpart of."""


@pytest.mark.slow  # `test_a_mutation_that_does_nothing_escapes` visits two; the planted faults of tests/quality prove each check
@pytest.mark.parametrize("name", list(exhibits()))
def test_exhibit_is_caught(name):
    (visit,) = tour(chosen([name]), sound=SOUND)
    assert len(visit.results) == len(visit.sound) == len(visit.exhibit.checks)
    assert not visit.missed, f"{name} escaped {visit.missed}"
    assert not visit.false_alarms, f"{visit.false_alarms} fail without {name} too"


@pytest.mark.parametrize("name", list(exhibits()))
def test_labels_are_complete(name):
    exhibit = exhibits()[name]
    assert exhibit.checks, f"{name} names no check"
    assert set(exhibit.checks) <= set(CHECKS)
    assert exhibit.path in PATHS
    assert exhibit.story.endswith(".")
    assert exhibit.source


def test_unknown_ids_are_refused():
    with pytest.raises(InvalidArgument, match="B9999"):
        chosen(["B9999", "B024"])


def test_a_mutation_that_does_nothing_escapes():
    """The tour itself can fail: an exhibit without a bug is reported as missed."""
    import dataclasses

    from fsdp_testing.museum import collection
    from fsdp_testing.museum.planting import planting

    sound = dataclasses.replace(exhibits()["B147"], id="B147", plant=planting())
    adapter = collection.implementation_of(sound)
    assert adapter.capabilities == collection.implementation_of(exhibits()["B147"]).capabilities
    sound = dataclasses.replace(sound, checks=("training.learning_rate_changes",))
    caught = [dataclasses.replace(exhibits()[name], checks=exhibits()[name].checks[:1]) for name in ("B036", "B147")]
    selection = [*caught, sound]
    found = [
        [(visit.exhibit.id, visit.missed, visit.false_alarms) for visit in tour(selection, jobs=jobs)]
        for jobs in (1, 3)
    ]
    assert found[0] == [("B036", (), ()), ("B147", (), ()), ("B147", ("training.learning_rate_changes",), ())]
    assert found[1] == found[0], "visits depend on how many go on at a time"
