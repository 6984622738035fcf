"""What all ranks hold together, and what of it has to agree where worlds of other sizes are compared."""

from __future__ import annotations

import torch

from fsdp_testing.train.function.whole import comparable


def quantities(loss=1.0, gradient=2.0, rate=0.1, parameter=3.0):
    named = {"loss": loss, "gradient of w": gradient, "learning rate": rate, "parameter w": parameter}
    return {name: [torch.tensor([value], dtype=torch.float64)] for name, value in named.items()}


def test_losses_decide_nothing_where_parameters_agree_and_gradients_do():
    names, left = comparable(quantities(), quantities(loss=0.5), 4)
    assert names == ["gradient of w", "learning rate", "parameter w"]
    assert left == ["what need not agree where parameters do: loss"]
    assert "loss" in comparable(quantities(), quantities(loss=1.01), 4)[0]
    # Adam takes the same step with half of the gradient: that is a mistake.
    assert "gradient of w" in comparable(quantities(), quantities(gradient=1.0), 4)[0]


def test_gradients_and_rates_that_differ_together_are_a_sum_for_a_mean():
    names, _ = comparable(quantities(), quantities(gradient=4.0, rate=0.05), 4)
    assert names == ["loss", "parameter w"]


def test_a_rate_that_differs_alone_is_compared_though_parameters_agree():
    names, left = comparable(quantities(), quantities(rate=0.2), 4)
    assert "learning rate" in names
    assert "gradient of w" in names
    assert left == []


def test_everything_is_compared_where_parameters_differ():
    names, left = comparable(quantities(), quantities(parameter=3.1, loss=0.5, rate=0.2), 4)
    assert (len(names), left) == (4, [])
    names, left = comparable(quantities(), {"loss": quantities()["loss"]}, 4)
    assert names == ["loss"]
    assert len(left) == 3
