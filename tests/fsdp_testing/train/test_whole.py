"""What the ranks hold together: the copies of weights among what a script keeps."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from fsdp_testing.train.quantities import Kind, Quantity
from fsdp_testing.train.whole import means_of_weights


def run(**copies):
    weights = {
        "weight": [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 4.0, 6.0])],
        "bias": [torch.zeros(1), torch.ones(1)],
    }
    quantities = {Quantity(Kind.PARAMETER, name): values for name, values in weights.items()}
    quantities |= {Quantity(Kind.COPY, name, "kept"): [torch.tensor(values)] for name, values in copies.items()}
    names = [key for key in quantities if key.kind is Kind.COPY]
    return SimpleNamespace(ranks=[], quantities=quantities, names=lambda _kind: names)


def names(**copies):
    return {key.name for key in means_of_weights(run(**copies))}


def test_a_mean_of_weights_lies_between_the_values_that_they_had():
    assert names(weight=[1.5, 3.0, 4.0], bias=[0.5]) == {"weight", "bias"}
    assert names(weight=[1.5, 3.0, 4.0], bias=[7.0]) == {"weight"}


def test_a_number_that_lies_between_them_by_chance_makes_no_copy_of_what_is_none():
    assert names(weight=[0.3, -2.0, 9.0], bias=[0.5]) == set()
