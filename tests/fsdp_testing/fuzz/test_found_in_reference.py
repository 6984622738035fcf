"""What campaigns found in the reference stays mended."""

from __future__ import annotations

import pytest
from fuzz_cases import case, micro

from fsdp_testing.fuzz.batch import Watch
from fsdp_testing.fuzz.lane import Lane
from fsdp_testing.pool import default_pool
from fsdp_testing.records import Batch, Case, ForwardBackward, SeveralForwards, ZeroGrad

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
}


@pytest.mark.parametrize("name", ["fsdp_ref-wrapper", "fsdp_ref-composable"])
@pytest.mark.parametrize("found", CASES.values(), ids=list(CASES))
def test_it_passes(name: str, found: Case):
    (result,) = Lane(default_pool(), name).run([found], Watch(operations=True))
    assert result.note.status == "passed", result.note.reason
    assert result.note.comparisons > 5
