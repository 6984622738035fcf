"""Norms of gradients that one rank holds; parts over groups are tested with ranks."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from fsdp_ref.errors import FsdpValueError
from fsdp_ref.training.clip import GradientPart, check_norm_type, scale_to, total_norm

CPU = torch.device("cpu")


@pytest.mark.covers("CLIP-02")
def test_the_zero_norm_counts_what_is_not_zero():
    assert total_norm([GradientPart((torch.tensor([0.0, 2.0, -3.0]), torch.tensor([1.0])))], 0, CPU).rounded() == 3


@pytest.mark.covers("CLIP-05", "B055")
def test_a_norm_beyond_half_precision_clips_instead_of_erasing():
    grads = (torch.full((16,), 60000.0, dtype=torch.float16),)
    norm = total_norm([GradientPart(grads)], 2, CPU)
    torch.testing.assert_close(norm.rounded(), torch.tensor(240000.0))
    assert norm.rounded().dtype == torch.float32
    scale_to(grads, norm, 4.0)
    torch.testing.assert_close(grads[0], torch.full((16,), 1.0, dtype=torch.float16))


@pytest.mark.covers("CLIP-06")
def test_no_gradient_anywhere_is_zero_in_float32_with_a_warning():
    with pytest.warns(UserWarning, match="with no gradients -- returning the total norm in the default dtype"):
        norm = total_norm([GradientPart(())], 2, CPU).rounded()
    assert (norm, norm.dtype) == (0.0, torch.float32)


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
