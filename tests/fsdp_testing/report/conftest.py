"""Fabricated reports: every verdict, every kind of finding, and text that tries to break out of its format."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from fsdp_testing.cases.records import (
    Batch,
    Case,
    CaseOutcome,
    CheckResult,
    Finding,
    ForwardBackward,
    ModelSpec,
    RunReport,
    Step,
    Verdict,
    WorldSpec,
)

CASE = Case(
    model=ModelSpec("mlp"),
    world=WorldSpec(2),
    program=(ForwardBackward(Batch(1)), Step()),
    seed=3,
)
HOSTILE = '</pre><script>alert(1)</script> & "quoted" ]]> \x00\x1b[31m \ud800 é'


def outcome(verdict: Verdict, **fields: object) -> CaseOutcome:
    values: dict[str, object] = {"world_size": 2, "seconds": 0.2, "worst_ratio": 0.1, "comparisons": 12, **fields}
    return CaseOutcome(CASE.identity, verdict, strategy="full_shard", **values)  # type: ignore[arg-type]  # fields by name


def diverged(**fields: object) -> Finding:
    values: dict[str, object] = {
        "kind": "diverged",
        "quantity": "gradient of blocks.1.weight",
        "operation": 0,
        "operation_text": "operation 0 forward_backward(batch 1)",
        "ranks": (0, 1),
        "explanation": "after operation 0 the gradient of blocks.1.weight is off by 0.37 on ranks 0 and 1",
        "case": CASE,
        "max_error": 0.37,
        "bound": 2e-12,
        "bound_derivation": "12 roundings x u(float64)=1.11e-16 x magnitude 1.5e3",
        **fields,
    }
    return Finding(**values)  # type: ignore[arg-type]  # fields by name


def result(implementation: str, check: str, verdict: Verdict, **fields: object) -> CheckResult:
    values: dict[str, object] = {
        "meaning": f"what {check} shows",
        "capabilities": ("full_shard",),
        "cases": (outcome(verdict),),
        "seconds": 0.4,
        **fields,
    }
    return CheckResult(implementation, check, verdict=verdict, **values)  # type: ignore[arg-type]  # fields by name


@pytest.fixture
def make() -> SimpleNamespace:
    """The builders above, for tests that need a report of their own."""
    return SimpleNamespace(result=result, diverged=diverged, outcome=outcome, case=CASE, hostile=HOSTILE)


@pytest.fixture
def good() -> RunReport:
    return RunReport(
        results=(
            result("torch-ddp", "training.sgd", Verdict.PASS),
            result(
                "torch-ddp",
                "training.adamw",
                Verdict.PASS,
                cases=(outcome(Verdict.PASS, world_size=3, worst_ratio=0.8),),
            ),
            result("torch-ddp", "hybrid.steps", Verdict.NOT_CLAIMED, explanation="hybrid is not claimed", cases=()),
        ),
        implementations=("torch-ddp",),
        environment={"torch": "2.13.0+cpu", "python": "3.11.7"},
        world_sizes=(2, 3),
        seconds=1.5,
    )


@pytest.fixture
def mixed() -> RunReport:
    """Two implementations, every verdict, every shape of finding, hostile text wherever text is allowed."""
    raised = diverged(
        kind="raised",
        quantity="exception",
        max_error=None,
        bound=None,
        bound_derivation="",
        operation=-1,
        operation_text="",
        explanation=f"rank 1 raised {HOSTILE}",
        detail="\n".join(f"line {i} {HOSTILE}" for i in range(80)),
        ranks=(1,),
    )
    return RunReport(
        results=(
            result("one", "training.sgd", Verdict.PASS),
            result(
                "one",
                "training.adamw",
                Verdict.FAIL,
                findings=(diverged(), diverged(max_error=math.nan)),
                explanation=diverged().explanation,
            ),
            result("one", "clip.inf", Verdict.UNKNOWN, cases=(outcome(Verdict.UNKNOWN, error=f"Lost {HOSTILE}"),)),
            result("one", "clip.two", Verdict.EXPECTED_FAILURE, expected=f"issue 1 {HOSTILE}", findings=(raised,)),
            result("one", "clip.one", Verdict.STALE, expected="issue 2, mended"),
            result("one", "hybrid.steps", Verdict.NOT_CLAIMED, explanation="hybrid is not claimed", cases=()),
            result("two & co", "training.sgd", Verdict.FAIL, findings=(diverged(bound=0.0), raised)),
            result("two & co", "training.adamw", Verdict.PASS),
        ),
        implementations=("one", "two & co"),
        environment={"torch": "2.13.0+cpu", HOSTILE.replace("\ud800", ""): "x"},
        world_sizes=(2,),
        seconds=12.25,
    )
