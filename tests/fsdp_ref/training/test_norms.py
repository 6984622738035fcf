"""Norms of gradients that one rank holds; parts over groups are tested with ranks."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from fsdp_ref.errors import FsdpValueError
from fsdp_ref.training.clip import GradientPart, check_norm_type, scale_to, total_norm

CPU = torch.device("cpu")


def reference(grads, p):
    params = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    return torch.nn.utils.get_total_norm([param.grad for param in params], p), params


@pytest.mark.covers("CLIP-02", "B059")
@pytest.mark.parametrize("p", [1, 2, 3, 2.5, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_equal_torchs(p, dtype):
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(shape, generator=generator, dtype=dtype) for shape in [(3, 4), (), (0, 5), (7,)]]
    norm = total_norm([GradientPart(tuple(grads))], p, CPU)
    want, _ = reference([g for g in grads if g.numel()], p)
    torch.testing.assert_close(norm.rounded(), want)
    assert norm.rounded().dtype == dtype


@pytest.mark.covers("CLIP-02")
def test_the_zero_norm_counts_what_is_not_zero():
    assert total_norm([GradientPart((torch.tensor([0.0, 2.0, -3.0]), torch.tensor([1.0])))], 0, CPU).rounded() == 3


@pytest.mark.covers("CLIP-05", "B055")
def test_half_precision_squares_do_not_overflow():
    grads = (torch.full((4,), 300.0, dtype=torch.float16), torch.full((4,), 400.0, dtype=torch.float16))
    norm = total_norm([GradientPart(grads)], 2, CPU)
    assert norm.rounded() == 1000.0
    assert norm.rounded().dtype == torch.float16
    scale_to(grads, norm, 10.0)
    assert torch.equal(grads[0], torch.full((4,), 3.0, dtype=torch.float16))


@pytest.mark.covers("CLIP-05", "B055")
def test_a_norm_beyond_half_precision_clips_instead_of_erasing():
    grads = (torch.full((16,), 60000.0, dtype=torch.float16),)
    norm = total_norm([GradientPart(grads)], 2, CPU)
    torch.testing.assert_close(norm.rounded(), torch.tensor(240000.0))
    assert norm.rounded().dtype == torch.float32
    scale_to(grads, norm, 4.0)
    torch.testing.assert_close(grads[0], torch.full((16,), 1.0, dtype=torch.float16))


@pytest.mark.covers("CLIP-05", "B057")
@pytest.mark.parametrize(
    ("dtypes", "result"),
    [
        ([torch.bfloat16], torch.bfloat16),
        ([torch.bfloat16, torch.float32], torch.float32),
        ([torch.bfloat16, torch.float16], torch.float32),
        ([torch.float32, torch.float64], torch.float64),
    ],
)
def test_the_result_has_the_dtype_that_all_gradients_promote_to(dtypes, result):
    grads = tuple(torch.full((4,), 1.0, dtype=dtype) for dtype in dtypes)
    norm = total_norm([GradientPart(grads)], 2, CPU).rounded()
    assert norm.dtype == result
    torch.testing.assert_close(norm, torch.tensor(math.sqrt(4 * len(dtypes)), dtype=result))


@pytest.mark.covers("CLIP-06")
def test_no_gradient_anywhere_is_zero_in_float32_with_a_warning():
    with pytest.warns(UserWarning, match="with no gradients -- returning the total norm in the default dtype"):
        norm = total_norm([GradientPart(())], 2, CPU).rounded()
    assert (norm, norm.dtype) == (0.0, torch.float32)


@pytest.mark.covers("CLIP-07")
def test_the_factor_is_at_most_one():
    small, large = (torch.tensor([3.0, 4.0]),), (torch.tensor([3.0, 4.0]),)
    scale_to(small, total_norm([GradientPart(small)], 2, CPU), 50.0)
    assert torch.equal(small[0], torch.tensor([3.0, 4.0]))
    scale_to(large, total_norm([GradientPart(large)], 2, CPU), 1.0)
    torch.testing.assert_close(large[0], torch.tensor([3.0, 4.0]) / (5.0 + 1e-6))


def test_parts_without_a_group_are_counted_once_each():
    parts = [GradientPart((torch.tensor([3.0]),)), GradientPart((torch.tensor([4.0]),))]
    assert total_norm(parts, 2, CPU).rounded() == 5.0
    assert total_norm(parts, math.inf, CPU).rounded() == 4.0


@pytest.mark.parametrize("p", [-1, -math.inf, math.nan])
def test_a_norm_that_is_none_is_refused_before_anything_is_sent(p):
    with pytest.raises(FsdpValueError, match="norm_type >= 0 or inf"):
        check_norm_type(p)


def test_an_all_nan_gradient_is_reported_as_nan():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for p in (2, math.inf):
            assert total_norm([GradientPart((torch.tensor([math.nan, 1.0]),))], p, CPU).rounded().isnan()
