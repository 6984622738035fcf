"""What the ranks hold together: the copies of weights among what a script keeps."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from fsdp_testing.train.holdings import buffers_beside, copies_in
from fsdp_testing.train.quantities import Kind, Quantity
from fsdp_testing.train.whole import copies_left_out, means_of_weights


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


def beside(model, tracker):
    spans = buffers_beside([{"model": model, "tracker": tracker, "part": tracker[0]}], [model], 1)
    return SimpleNamespace(copies={}, called=(), beside=spans)


def test_buffers_of_other_modules_that_differ_between_ranks_are_named_as_not_compared():
    model, tracker = torch.nn.BatchNorm1d(2), torch.nn.Sequential(torch.nn.BatchNorm1d(2, affine=False))
    ranks = [beside(model, tracker)]
    model.running_mean += 1  # of the model: compared elsewhere
    tracker[0].running_mean += 1
    ranks.append(beside(model, tracker))
    world = SimpleNamespace(ranks=ranks, own=(), disagreements=(), quantities={})
    (sentence,) = copies_left_out(run(), world)
    assert sentence == (
        "the buffer 'tracker.0.running_mean' outside of the trained model: rank 1 has other numbers than an earlier rank"
    )


def test_a_state_that_shares_the_memory_of_the_weights_is_no_copy_of_them():
    """Seen: one process took over the state that it loaded, and two ranks copied it."""
    model = torch.nn.Linear(3, 2)
    copied = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    variables = {"taken": {**model.state_dict()}, "copied": copied}
    copies, _ = copies_in([variables], [model], 1024, ())
    assert {name: sorted(spans) for name, spans in copies.items()} == {"copied": ["bias", "weight"]}
