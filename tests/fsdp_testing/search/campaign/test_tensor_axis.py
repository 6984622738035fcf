"""Over two axes of a mesh: few drawn cases show each fault of tensor parallelism, and nothing in what is right."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest

from fsdp_testing.adapters import registry
from fsdp_testing.cases.drawing import FEATURES, CaseDrawer, Scope, SeededChoices
from fsdp_testing.cases.records import Case
from fsdp_testing.judging.case_runner import CaseRunner
from fsdp_testing.ranks.pool import default_pool

FAULTS = str(Path(__file__).parents[2] / "checks" / "suites")
if FAULTS not in sys.path:
    sys.path.insert(0, FAULTS)
DRAWN = frozenset({"wrap.nested", "tree.norm", "op.step", "op.clip", "op.save", "optimizer.momentum"})
"""Short programs on small trees: each new shape costs DTensor milliseconds on each rank."""
SEEDS = (14, 16, 21, 26, 38)
"""Of the first forty cases five: with rows cut, two with columns cut and clipped, and one that saves what is cut."""


@cache
def drawn() -> list[Case]:
    claimed = registry.load("torch-fsdp2").claimed(2)
    scope = Scope(claimed, (4,), 4, frozenset(FEATURES) - DRAWN, tensor_parallel=2)
    return [CaseDrawer(scope).draw(SeededChoices(seed)) for seed in SEEDS]


@cache
def judged(name: str) -> list[str]:
    results = CaseRunner(default_pool()).judge_batch(name, drawn())
    return [result.signature.kind if result.signature else result.verdict.value for result in results]


NIGHTLY = ("PARTIAL_SUMS", "NORM_OF_ONE_AXIS", "COUNTED_TWICE", "FIRST_PART")
"""Each push judges their faults by a case for each: tests/fsdp_testing/checks/suites/test_tensor_axis.py."""


@pytest.mark.parametrize("fault", ["OWN_GRADIENT", *(pytest.param(fault, marks=pytest.mark.slow) for fault in NIGHTLY)])
def test_a_fault_of_tensor_parallelism_is_found_in_few_cases(fault: str):
    healthy, found = judged("torch-fsdp2"), judged(f"faults_tensor_axis:{fault}")
    assert healthy == ["pass"] * len(SEEDS)
    assert "diverged" in found, found
