"""What is read through private names of torch is what it says."""

from __future__ import annotations

import pytest
import torch

from fsdp_testing.base.compat import factors_of


@pytest.mark.parametrize(
    ("weighted", "factors"),
    [
        (lambda loss: loss, ()),
        (lambda loss: loss / 4, (0.25,)),
        (lambda loss: 0.25 * loss, (0.25,)),
        (lambda loss: torch.tensor(0.25) * loss, (0.25,)),
        (lambda loss: loss / 4 * torch.tensor(1024.0), (1024.0, 0.25)),
        (lambda loss: loss / 4 + 0.25 * loss, (0.25,)),
        (lambda loss: loss / 4 + loss, ()),
        (lambda loss: (loss / 4).exp(), ()),
        (lambda loss: torch.tensor(4.0) / loss, ()),
        (lambda loss: loss * loss.exp() / 4, (0.25,)),
    ],
)
def test_the_constants_that_a_loss_was_multiplied_with_last(weighted, factors):
    weights = torch.ones(3, dtype=torch.float64, requires_grad=True)
    assert factors_of(weighted(weights.square().mean())) == factors


def test_a_leaf_has_none():
    assert factors_of(torch.ones(())) == ()
