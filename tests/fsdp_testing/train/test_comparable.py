"""What all ranks hold together, and what of it has to agree where worlds of other sizes are compared."""

from __future__ import annotations

import torch

from fsdp_testing.train.comparable import comparable
from fsdp_testing.train.quantities import LOSS, RATE, Kind, Quantity


def quantities(loss=1.0, gradient=2.0, rate=0.1, parameter=3.0):
    named = {LOSS: loss, Quantity(Kind.GRADIENT, "w"): gradient, RATE: rate, Quantity(Kind.PARAMETER, "w"): parameter}
    return {key: [torch.tensor([value], dtype=torch.float64)] for key, value in named.items()}


def compared(reference, other):
    """Return what is to be compared, and what is not, in words."""
    chosen = comparable(reference, other, 4)
    return [*map(str, chosen.names)], chosen.left_out()


def test_losses_decide_nothing_where_parameters_agree_and_gradients_do():
    names, left = compared(quantities(), quantities(loss=0.5))
    assert names == ["gradient of w", "learning rate", "parameter w"]
    assert left == ["ignored because parameters agree: loss"]
    assert "loss" in compared(quantities(), quantities(loss=1.01))[0]
    # Adam takes the same step with half of the gradient: that is a mistake.
    assert "gradient of w" in compared(quantities(), quantities(gradient=1.0))[0]


def test_gradients_and_rates_that_differ_together_are_a_sum_for_a_mean():
    names, _ = compared(quantities(), quantities(gradient=4.0, rate=0.05))
    assert names == ["loss", "parameter w"]


def test_a_rate_that_differs_alone_is_compared_though_parameters_agree():
    names, left = compared(quantities(), quantities(rate=0.2))
    assert "learning rate" in names
    assert "gradient of w" in names
    assert left == []


def test_everything_is_compared_where_parameters_differ():
    names, left = compared(quantities(), quantities(parameter=3.1, loss=0.5, rate=0.2))
    assert (len(names), left) == (4, [])
    names, left = compared(quantities(), {LOSS: quantities()[LOSS]})
    assert names == ["loss"]
    assert len(left) == 3


def test_quantities_of_one_kind_that_only_one_world_has_are_told_together():
    moments = {Quantity(Kind.MOMENT, name, part): [torch.ones(1)] for part in ("m", "v") for name in ("a", "b", "c")}
    _, left = compared(quantities() | moments, quantities())
    assert left == [
        "optimizer state m of a and 2 more, which only one of both worlds has at each step",
        "optimizer state v of a and 2 more, which only one of both worlds has at each step",
    ]
