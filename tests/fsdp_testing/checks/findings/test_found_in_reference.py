"""What campaigns found in the reference stays mended."""

from __future__ import annotations

import pytest
from fuzz_cases import case, micro

from fsdp_testing.cases.records import (
    Batch,
    BuildOptimizer,
    Case,
    Forward,
    ForwardBackward,
    MixedPrecisionSpec,
    Move,
    ReplaceParameters,
    SeveralForwards,
    Step,
    Verdict,
    WrappingPlan,
    ZeroGrad,
)
from fsdp_testing.judging.batch import Watch
from fsdp_testing.judging.case_runner import CaseRunner
from fsdp_testing.ranks.pool import default_pool

IDLE_RANK = (0, 2)
NOBODY = (0, 0)

CASES = {
    # Zeros of a rank without rows were taken for zero_grad(set_to_none=False): its reduced gradient was dropped.
    "zeros kept by no_sync are not a zero_grad": case(
        micro(1),
        ForwardBackward(Batch(1, IDLE_RANK), no_sync=True),
        SeveralForwards((Batch(5, NOBODY), Batch(6, (4,)))),
        strategy="full_shard",
    ),
    "zero_grad in no_sync still clears": case(
        micro(1),
        ForwardBackward(Batch(2, (2,)), no_sync=True),
        ZeroGrad(set_to_none=False),
        micro(3),
        strategy="full_shard",
    ),
    # The cast of a first forward in inference mode left buffers that no later forward could change.
    "buffers are cast for training, too": case(
        Forward(Batch(1), "inference"),
        micro(2),
        nodes=({"kind": "buffer", "style": "running", "name": "c"}, {"kind": "linear", "name": "last", "out": 2}),
        strategy="full_shard",
        dtype="float32",
        mixed_precision=MixedPrecisionSpec(buffer_dtype="bfloat16"),
    ),
    # What a cast made the shard in a first forward in inference mode could not be trained.
    "a cast before inference": case(
        Move("float64"),
        BuildOptimizer(),
        Forward(Batch(1), "inference"),
        micro(2),
        Step(),
        nodes=({"kind": "linear", "name": "a"}, {"kind": "linear", "name": "b", "out": 2}),
        dtype="float32",
    ),
    # What no_sync had kept gathered stayed so through a synchronising backward that does not reach the unit.
    "a unit that only no_sync kept is freed": case(
        ForwardBackward(Batch(1), no_sync=True),
        micro(2),
        nodes=(
            {"kind": "group", "name": "b", "dropped": True, "nodes": [{"kind": "linear", "name": "b"}]},
            {"kind": "linear", "name": "last"},
        ),
        strategy="shard_grad_op",
        wrapping=WrappingPlan(("b",)),
    ),
    # The harness looked at the shard where users see the parameters that `module.to` has given them.
    "a cast is seen at once": case(Move("float32"), BuildOptimizer(), strategy="full_shard"),
    # Other parameters in the place of gathered ones, with an optimizer that holds the first ones.
    "replaced parameters train on": case(
        micro(1), ReplaceParameters(("*",), 0.5), Step(), ReplaceParameters(("*",), -1.0), micro(2), Step()
    ),
}


@pytest.mark.parametrize("name", ["fsdp_ref-wrapper", "fsdp_ref-composable"])
@pytest.mark.parametrize("found", CASES.values(), ids=list(CASES))
def test_it_passes(name: str, found: Case):
    (result,) = CaseRunner(default_pool()).judge_batch(name, [found], Watch(operations=True))
    assert result.verdict is Verdict.PASS, result.judgement.why
    assert result.judgement.tally.comparisons >= 5
