"""Memory that nobody wrote to holds garbage while a case runs, and only then."""

from __future__ import annotations

import pytest
import torch

from fsdp_testing.programs.fresh_memory import filled_with_garbage

FROM_THE_SYSTEM = 4_300_000
"""So many elements of eight bytes come from the system as zeros."""


@pytest.mark.parametrize("numel", [3, 300, FROM_THE_SYSTEM])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_new_memory_holds_no_number_that_passes_for_right(numel, dtype):
    with filled_with_garbage():
        fresh = torch.empty(numel, dtype=dtype)
    assert (fresh.double().abs() > 1e38).all()


def test_zeroed_memory_and_results_are_as_ever():
    with filled_with_garbage():
        assert torch.zeros(300).abs().max() == 0
        assert torch.ones(300).double().sum() == 300
        assert bytearray(1000) == b"\0" * 1000


def test_it_ends_with_the_context():
    with filled_with_garbage():
        pass
    assert torch.empty(FROM_THE_SYSTEM, dtype=torch.float64).abs().max() == 0
