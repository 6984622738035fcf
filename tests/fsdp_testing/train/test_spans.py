"""What is kept of each rank's part of a tensor, elements or sums, and what all parts are together."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from fsdp_testing.adapters.protocol import Piece
from fsdp_testing.train.spans import MOST_WHOLE, Span, assembled, block_of, span_of

SHAPE = (90, 100)
NUMBERS = 9000


def span(start, values):
    return Span((3,), start, start + len(values), torch.tensor(values))


def part(values, start, stop, block=8):
    return span_of(Piece(SHAPE, start, stop, None), values.reshape(-1)[start:stop], block)


@pytest.fixture
def values():
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))


def test_spans_are_put_together_and_ranks_that_contradict_are_named():
    whole, odd = assembled([(span(0, [1.0, 2.0]),), (span(1, [2.0, 3.0]),)])
    assert (whole.tolist(), odd) == ([1.0, 2.0, 3.0], None)
    assert assembled([(span(0, [1.0, 2.0]),), (span(0, [2.0, 3.0]),)])[1] == 1
    assert assembled([(span(0, [1.0, 2.0]),)])[0].isnan().tolist() == [False, False, True]


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_whole_numbers_have_no_nan_and_are_put_together_all_the_same(dtype):
    parts = [
        (Span((3,), 0, 2, torch.tensor([1, 0], dtype=dtype)),),
        (Span((3,), 2, 3, torch.tensor([1], dtype=dtype)),),
    ]
    assert assembled(parts)[0].equal(torch.tensor([1, 0, 1], dtype=dtype))
    assert assembled(parts[:1])[0].isnan().tolist() == [False, False, True]


def test_a_small_model_and_a_small_tensor_are_kept_element_by_element(values):
    assert [block_of(n) for n in (1, MOST_WHOLE, MOST_WHOLE + 1, 2 * MOST_WHOLE + 1, 100 * MOST_WHOLE)] == [
        1,
        1,
        2,
        4,
        128,
    ]
    assert torch.equal(assembled([(part(values, 0, NUMBERS, block=1),)])[0], values)
    small = values[:10]
    kept = span_of(Piece((10, 100), 0, 1000, None), small, 8)
    assert torch.equal(assembled([(kept,)])[0], small)


@pytest.mark.parametrize("edges", [(0, 4500, 9000), (0, 3001, 3001, 9000), (0, 5, 8, 8999, 9000)])
def test_sums_of_parts_are_those_of_the_whole_wherever_it_is_cut(values, edges):
    whole, _ = assembled([(part(values, 0, NUMBERS),)])
    cut, odd = assembled([(part(values, a, b),) for a, b in pairwise(edges)])
    assert whole.shape == (NUMBERS // 8,)
    assert odd is None
    assert whole.dtype == torch.float32
    # Sums in float64, which another order moves by far less than the one rounding to float32 that each of the two has.
    assert torch.allclose(cut, whole, rtol=0, atol=2 * 2**-24 * float(whole.abs().max()))
    assert assembled([(part(values, 0, 4500),)])[0].isnan().all()


def test_each_element_moves_its_sum_by_as_much_and_one_changed_bit_is_seen_between_ranks(values):
    whole, _ = assembled([(part(values, 0, NUMBERS),)])
    moved = values.clone()
    moved[40, 7] += 1.0
    away = (assembled([(part(moved, 0, NUMBERS),)])[0] - whole).abs()
    assert away.nonzero().tolist() == [[4007 // 8]]
    assert float(away.max()) == pytest.approx(1.0, abs=1e-5)
    moved = values.clone()
    moved.view(torch.int32)[40, 7] += 1
    kept = part(values, 0, NUMBERS)
    assert assembled([(kept,), (part(moved, 0, NUMBERS),)])[1] == 1
    assert assembled([(kept,), (part(values, 0, NUMBERS),)])[1] is None
    assert kept.equals(values)
    assert not kept.equals(moved)
