"""The mean of gradients, cast by cast."""

from __future__ import annotations

import itertools

import pytest
import torch

from fsdp_testing.adapters.protocol import Division
from fsdp_testing.oracle.reduction import reduce, roundings

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64


def parts(count, seed=0, dtype=F32):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(50, generator=draw, dtype=F64).to(dtype) for _ in range(count)]


def test_it_is_the_mean():
    contributions = parts(4, dtype=F64)
    torch.testing.assert_close(reduce(contributions, F64, F64, None).mean, torch.stack(contributions).mean(0))


@pytest.mark.parametrize("size", [1, 2])
def test_up_to_two_ranks_nothing_is_in_doubt(size):
    found = reduce(parts(size), BF16, F32, None)
    assert not found.error.any()
    assert "bitwise" in found.derivation


@pytest.mark.parametrize("size", [3, 4, 5, 8])
@pytest.mark.parametrize("division", [None, Division(1.0, 0.0), Division(0.0, 1.0)])
def test_any_order_and_any_division_stay_within_the_bound(size, division):
    if division is not None:
        division = Division(division.before or size, division.after or size)
    contributions = parts(size)
    found = reduce(contributions, BF16, F32, division)
    for order in itertools.islice(itertools.permutations(contributions), 40):
        before, after = (1, size) if division is None else (division.before, division.after)
        total = order[0].to(BF16) / before
        for part in order[1:]:
            total = total + part.to(BF16) / before
        assert bool(((total / after).to(F32) - found.mean).abs().le(found.error).all())


def test_a_missing_rank_is_beyond_the_bound():
    contributions = parts(3)
    found = reduce(contributions, F32, F32, None)
    wrong = sum(contributions[:2]) / 3
    assert bool(((wrong - found.mean).abs() > found.error).any())


def test_casts_happen_before_the_sum():
    contributions = [torch.tensor([1.0 + 2**-9]), torch.tensor([2.0**-9])]
    assert reduce(contributions, BF16, F32, None).mean.item() == 0.5
    assert reduce(contributions, F32, F32, None).mean.item() == (1.0 + 2**-8) / 2


def test_a_half_sum_may_overflow_and_is_not_hidden():
    contributions = [torch.tensor([60000.0]), torch.tensor([60000.0])]
    assert torch.isinf(reduce(contributions, torch.float16, F32, Division(1.0, 2.0)).mean).all()
    assert reduce(contributions, torch.float16, F32, Division(2.0, 1.0)).mean.item() == 60000.0


def test_bounds_of_small_numbers_in_float16_do_not_vanish():
    """Computed in float16 they did: DDP failed by one unit in the last place of a gradient of 1e-5."""
    small = torch.full((4,), 1e-5, dtype=torch.float16)
    assert bool((roundings(3, (torch.float16,), small) > 3 * 2.0**-26).all())
    found = reduce([small, small / 2, -small / 4], torch.float16, torch.float16, None)
    assert bool((found.error >= found.magnitude * 2.0**-11).all())
    assert found.error.dtype == torch.float64
