"""What becomes of a case whose numbers were compared: passed, suspect, or not judged."""

from __future__ import annotations

import pytest

from fsdp_testing.checkers import parity
from fsdp_testing.checkers.divergence import Divergence, Tally
from fsdp_testing.checkers.quantities import Quantity
from fsdp_testing.fuzz import judge, screen
from fsdp_testing.fuzz.batch import Watch
from fsdp_testing.implementations import registry
from fsdp_testing.records import Batch, Case, ForwardBackward, ModelSpec, WorldSpec

CASE = Case(ModelSpec("mlp"), WorldSpec(2), (ForwardBackward(Batch(0)),))
OFF = Divergence("diverged", Quantity("gradient", "w"), 0, (0,), "is off by 3")


@pytest.mark.parametrize(
    ("tally", "status", "reason"),
    [
        (Tally(comparisons=3), "passed", ""),
        (Tally(), "unjudged", "nothing was compared"),
        (Tally(comparisons=3, undecided=[OFF]), "unjudged", "gradient of w is off by 3"),
        (Tally(comparisons=3, undecided=[OFF], divergences=[OFF]), "suspect", "gradient of w is off by 3"),
    ],
)
def test_only_what_was_decided_passes(monkeypatch, tally, status, reason):
    monkeypatch.setattr(screen, "cleared", lambda points, ranks, comparison: -1)
    monkeypatch.setattr(parity, "compare", lambda expectation, ranks, comparison: tally)
    note = judge._compare(registry.load("torch-ddp"), CASE, [], Watch())
    assert (note.status, note.reason) == (status, reason)
