"""The first module whose numbers are wrong is named, and none where a sound implementation is watched."""

from __future__ import annotations

import pytest
import torch

from fsdp_testing.cases.models import MODELS
from fsdp_testing.cases.records import (
    Batch,
    Case,
    FailureKind,
    Forward,
    ForwardBackward,
    MixedPrecisionSpec,
    ModelSpec,
    Step,
    WorldSpec,
    WrappingPlan,
    ZeroGrad,
)
from fsdp_testing.checks.conformance import run_conformance
from fsdp_testing.explain.modules import first_wrong_module
from fsdp_testing.explain.root_causes import cause_of
from fsdp_testing.judging.case_runner import CaseRunner, RunMode
from fsdp_testing.judging.checkers.divergence import Divergence
from fsdp_testing.oracle import assemble, rank_jobs
from fsdp_testing.oracle.module_values import GRADIENT, INPUT, OUTPUT, PARAMETER, Seen
from fsdp_testing.oracle.quantities import Comparison, Expected, Quantity
from fsdp_testing.report.conformance import complete_sheet, short_sheet
from fsdp_testing.report.html import html_text
from fsdp_testing.report.sheet import Article, Line

FIRST, LAST = Batch(0), Batch(1)
CASE = Case(ModelSpec("mlp"), WorldSpec(2), (ForwardBackward(FIRST), ForwardBackward(LAST)))


# ------------------------------------------------------------------------------------------- from values to a sentence


def calls(operation: int, batch: Batch) -> list[Seen]:
    """What is seen of two modules of one forward and backward, on both ranks, in order."""
    order = [("a", PARAMETER, "w"), ("a", OUTPUT, "0"), ("b", INPUT, "0"), ("b", PARAMETER, "w")]
    order += [("b", OUTPUT, "0"), ("b", GRADIENT, "0"), ("a", GRADIENT, "0")]
    return [Seen(operation, (batch, 0), rank, name, 0, *rest) for rank in (0, 1) for name, *rest in order]


ALL = [*calls(0, FIRST), *calls(1, LAST)]
TRUTH = {seen: Expected(torch.full((2,), float(place)), 0.25) for place, seen in enumerate(ALL)}


def said(off: dict[Seen, float], wrong: list[Divergence] | None = None, hidden: tuple[Seen, ...] = ()) -> str:
    ranks = [
        {
            s: one.value + off.get(s, 0.1)
            for s, one in TRUTH.items()
            if s.rank == rank and s not in hidden and one.value is not None
        }
        for rank in (0, 1)
    ]
    return first_wrong_module(CASE, 1, TRUTH, ranks, wrong or [])


def seen(what: str, module: str, rank: int, operation: int = 1) -> Seen:
    return next(
        s for s in calls(operation, (FIRST, LAST)[operation]) if (s.what, s.module, s.rank) == (what, module, rank)
    )


def test_of_several_wrong_tensors_the_first_on_any_rank_is_named() -> None:
    parameter = said({seen(PARAMETER, "b", 1): 1.0, seen(OUTPUT, "b", 0): 1.0, seen(OUTPUT, "b", 1): 1.0})
    assert parameter.startswith(
        "`b` is the first module that computes with wrong numbers: its w on rank 1 in operation 1, "
    )
    output = said({seen(OUTPUT, "b", 0): 1.0, seen(OUTPUT, "b", 1): 1.0, seen(GRADIENT, "b", 0): 1.0})
    assert output.startswith(
        "`b` is the first module whose output is wrong, on ranks 0 and 1 in operation 1, forward-backw"
    )
    assert output.endswith("(element 0: got 19, expected 18); its parameters are right")
    gradient = said({seen(GRADIENT, "a", 1): 1.0})
    assert gradient.startswith(
        "every output is right; the gradient of the output of `a` is the first that is wrong, on rank 1"
    )
    assert said({seen(INPUT, "b", 0): 1.0}).startswith("the input of `b` is the first wrong value, on rank 0 in")
    assert "in operation 0," in said({seen(OUTPUT, "b", 1, 0): 1.0, seen(PARAMETER, "a", 0): 1.0})


def test_what_is_wrong_after_right_calls_is_told_from_the_last_module_to_the_first() -> None:
    def diverged(kind: str, fqn: str, part: str = "") -> Divergence:
        return Divergence(FailureKind.DIVERGED, Quantity(kind, fqn, part), 1, (1,), "is off")

    right = "its output and the gradient of its output are right"
    both = [diverged("gradient", "a.w"), diverged("gradient", "b.w")]
    assert said({}, both) == f"`b`: {right}, the gradient of its w is wrong on rank 1 (and that of 1 more)"
    assert said({}, [diverged("value", "a.w"), *both]).startswith("`b`: ")
    assert (
        said({}, [diverged("optimizer", "a.w", "exp_avg")]) == f"`a`: {right}, the exp_avg of its w is wrong on rank 1"
    )
    uncalled = said({}, [diverged("gradient", "c.w")])
    assert (
        uncalled == "`c`: it is not called in operation 1, forward-backward, the gradient of its w is wrong on rank 1"
    )
    assert said({}, [diverged("gradient", "a.w"), diverged("result", "loss")]) == said({}) == ""


def test_what_was_not_seen_is_not_spoken_of() -> None:
    assert said({}, hidden=tuple(ALL)) == ""
    gradients = tuple(s for s in ALL if s.what == GRADIENT)
    wrong = [Divergence(FailureKind.DIVERGED, Quantity("gradient", "a.w"), 1, (0,), "is off")]
    assert said({}, wrong, gradients) == "`a`: its output is right, the gradient of its w is wrong on rank 0"
    # Whether an output is right is not known where one rank did not show it.
    assert said({}, wrong, (seen(OUTPUT, "a", 1),)) == "`a`: the gradient of its w is wrong on rank 0"
    assert "parameters" not in said({seen(OUTPUT, "a", 0): 1.0}, hidden=(seen(PARAMETER, "a", 0),))


# --------------------------------------------------------------------------------------------------- on ranks


@pytest.mark.parametrize(
    ("fault", "check", "place"),
    [
        (
            "WRONG_GRADIENT",
            "training.gradients_are_means",
            "`layers.1`: its output and the gradient of its output are right, the gradient of its weight is wrong on rank",
        ),
        (
            "WRONG_OUTPUT",
            "training.gradients_are_means",
            "`layers.1` is the first module whose output is wrong, on rank 1 in operation 0, forward-backward (element ",
        ),
        (
            "WRONG_BACKWARD",
            "training.gradients_are_means",
            "every output is right; the gradient of the output of `layers.1` is the first that is wrong, on ranks 0 and 1",
        ),
        (
            "WRONG_STEP",
            "forward_only.eval",
            "`layers.1`: its output is right, its weight is wrong on ranks 0 and 1",
        ),
        ("SHY", "training.gradients_are_means", ""),
    ],
)
def test_the_module_is_named(fault: str, check: str, place: str) -> None:
    report = run_conformance(f"one_module_adapter:{fault}", checks=(check,), world_sizes=(2,), explain=300.0)
    places = [f.shortest.place for result in report.results for f in result.findings if f.shortest is not None]
    assert places
    assert all(one.startswith(place) if place else not one for one in places), places
    (article,) = short_sheet(report).sections[0].blocks[:1]
    assert isinstance(article, Article)
    assert (Line(f"module by module: {places[0]}", "said") in article.blocks) == bool(place)
    assert ("module by module: " in html_text(complete_sheet(report)).lower()) == bool(place)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_parameter_without_elements_does_not_prevent_an_explanation(dtype: str) -> None:
    """In 16 bits its bound is a tensor without elements, which has no maximum."""
    case = Case(
        ModelSpec("empty_parameters", dtype=dtype), WorldSpec(2), (ForwardBackward(FIRST),), strategy="full_shard"
    )
    assert cause_of(CaseRunner(), "stale_adapter:TWO_MEANS", case)


def test_a_finding_of_the_fuzzer_names_it_too() -> None:
    case = Case(ModelSpec("mlp", dtype="float64"), WorldSpec(2), (ForwardBackward(FIRST),), strategy="full_shard")
    cause = cause_of(CaseRunner(), "stale_adapter:TWO_MEANS", case)
    assert "is 2 times the right values" in cause
    assert (
        "; `layers.2`: its output and the gradient of its output are right, the gradient of its bias is wrong" in cause
    )


PROGRAM = (ForwardBackward(FIRST, no_sync=True), ForwardBackward(LAST), Step(), ZeroGrad(), Forward(Batch(2), "eval"))


IMPLEMENTATIONS = ("torch-fsdp1", "torch-fsdp2", "fsdp_ref-wrapper", "fsdp_ref-composable")


@pytest.mark.parametrize(
    ("name", "low"), [("torch-ddp", False), *((name, low) for name in IMPLEMENTATIONS for low in (False, True))]
)
def test_a_sound_implementation_shows_what_one_process_computes(name: str, low: bool) -> None:
    case = Case(
        ModelSpec("called_twice", dtype="float32" if low else "float64"),
        WorldSpec(2),
        PROGRAM,
        wrapping=WrappingPlan(units=() if name == "torch-ddp" else MODELS["called_twice"].units),
        strategy="no_shard" if name == "torch-ddp" else "full_shard",
        mixed_precision=MixedPrecisionSpec("bfloat16", "float32") if low else None,
    )
    runner = CaseRunner()
    watched = RunMode(job=rank_jobs.run_watched)
    judged = runner.judge(name, case, Comparison(lockstep=low), closely=True, mode=watched)
    assert judged.finding is None, judged.finding
    adopted = assemble.states(judged.ranks) if low else None
    expected = runner.on_ranks(rank_jobs.expect_modules, case, name, adopted, size=1)[0]
    ranks = [rank.modules for rank in judged.ranks]  # type: ignore[attr-defined]
    assert {key for rank in ranks for key in rank} == set(expected)
    assert {key.what for key in expected} == {INPUT, PARAMETER, OUTPUT, GRADIENT}
    nothing = [Divergence(FailureKind.DIVERGED, Quantity("result", "total_norm"), len(PROGRAM), (), "")]
    assert first_wrong_module(case, len(PROGRAM), expected, ranks, nothing) == ""
