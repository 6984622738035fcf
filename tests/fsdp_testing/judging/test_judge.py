"""What becomes of a case whose numbers were compared: passed, suspect, or not judged."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdp_testing.campaign.batch import Watch
from fsdp_testing.checkers import parity
from fsdp_testing.checkers.divergence import Divergence, Tally
from fsdp_testing.checkers.quantities import Expectation, Quantity
from fsdp_testing.implementations import registry
from fsdp_testing.judging import judge, screen
from fsdp_testing.programs import oracle
from fsdp_testing.records import Batch, Case, ForwardBackward, MixedPrecisionSpec, ModelSpec, WorldSpec

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


@pytest.mark.parametrize(
    ("first", "second", "asked"),
    [
        (Tally(comparisons=3), Tally(), [False]),
        (Tally(comparisons=3, divergences=[OFF]), Tally(comparisons=3), [False, True]),
        (Tally(comparisons=3, divergences=[OFF]), Tally(comparisons=3, divergences=[OFF]), [False, True]),
        (Tally(comparisons=3, undecided=[OFF]), Tally(comparisons=3), [False, True]),
    ],
)
def test_a_case_in_lockstep_is_replayed_again_where_one_replay_does_not_settle_it(monkeypatch, first, second, asked):
    replays: list[bool] = []
    tallies = iter((first, second))

    def expect(_case, _division, _states, *, displaced=True):
        replays.append(displaced)
        return Expectation((), {}, {})

    monkeypatch.setattr(oracle, "expect_lockstep", expect)
    monkeypatch.setattr(parity, "compare", lambda expectation, ranks, comparison: next(tallies))
    case = replace(CASE, mixed_precision=MixedPrecisionSpec("bfloat16"))
    note = judge._compare(registry.load("torch-ddp"), case, [], Watch())
    last = second if len(asked) > 1 else first
    assert replays == asked
    assert note.status == ("suspect" if last.divergences else "passed")
