"""What a method of an adapter returns is told with the method's name if it is not what the method promises."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from fsdp_testing.adapters.protocol import Division, Piece
from fsdp_testing.adapters.returned import PROMISES, checked
from fsdp_testing.errors import InvalidImplementation

PIECE = Piece((2,), 0, 2, torch.zeros(2))
SGD = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)

RIGHT = {
    "no_sync": [nullcontext()],
    "clip_grad_norm": [torch.tensor(1.0)],
    "full_parameters": [nullcontext({})],
    "local_pieces": [{}, {"a": (PIECE,)}, {"a": ()}],
    "optimizer_pieces": [{}, {"a": {"exp_avg": (PIECE,), "step": 3.0}}],
    "division": [None, Division(1.0, 2.0)],
    "full_state_dict": [{}, {"a": torch.zeros(1), "_extra_state": "text"}],
    "sharded_state_dict": [{}],
    "local_state_dict": [{}],
    "full_optimizer_state": [{"state": {"a": {"step": 1}}, "param_groups": []}, {"state": {}}, {}],
    "sharded_optimizer_state": [{}],
    "unshard_async": [None, lambda: None],
    "trace_units": [nullcontext()],
    "gathered_bytes": [{}],
    "build_optimizer": [SGD],
}

WRONG = [
    ("no_sync", None, "a context manager, got NoneType None"),
    ("clip_grad_norm", 0.5, "the norm before clipping as a tensor, got float 0.5"),
    ("full_parameters", {}, "a context manager, got dict {}"),
    ("local_pieces", None, "a mapping, got NoneType None"),
    ("local_pieces", {"a": torch.zeros(1)}, "a tuple of Piece for 'a', got Tensor tensor([0.])"),
    ("local_pieces", {"a": PIECE}, "a tuple of Piece for 'a', got Piece"),
    ("optimizer_pieces", {"a": torch.zeros(1)}, "a mapping, got Tensor tensor([0.]) for 'a'"),
    ("optimizer_pieces", {"a": {"m": torch.zeros(1)}}, "a number or a tuple of Piece for 'm' of 'a', got Tensor"),
    ("division", 2, "a Division or None, got int 2"),
    ("full_state_dict", None, "a mapping, got NoneType None"),
    ("full_state_dict", {"a": np.zeros(1)}, "a tensor for 'a', got ndarray"),
    ("sharded_state_dict", [], "a mapping, got list []"),
    ("local_state_dict", [], "a mapping, got list []"),
    ("full_optimizer_state", {"a": 1}, "a mapping with the mapping `state`, got dict {'a': 1}"),
    ("full_optimizer_state", {"state": {0: {}}}, "names of parameters as keys of `state`, got int 0"),
    ("sharded_optimizer_state", None, "a mapping, got NoneType None"),
    ("unshard_async", 3, "a function that waits, or None, got int 3"),
    ("trace_units", None, "a context manager, got NoneType None"),
    ("gathered_bytes", 7, "a mapping, got int 7"),
    ("build_optimizer", None, "an optimizer with `param_groups`, got NoneType None"),
]


def test_every_promise_is_kept_and_broken_here():
    assert set(RIGHT) == set(PROMISES) == {method for method, _, _ in WRONG}


@pytest.mark.parametrize("method", RIGHT)
def test_what_is_promised_passes(method):
    for value in RIGHT[method]:
        assert checked("mine", method, lambda value=value: value)() is value


@pytest.mark.parametrize(("method", "value", "said"), WRONG)
def test_anything_else_is_told_with_the_method(method, value, said):
    with pytest.raises(InvalidImplementation) as caught:
        checked("mine", method, lambda: value)()
    assert f"implementation 'mine': `{method}` returned something else than it promises: expected {said}" in str(
        caught.value
    )


def test_every_problem_is_listed():
    with pytest.raises(InvalidImplementation, match="for 'a', got NoneType None; .* for 'b', got int 1"):
        checked("mine", "local_pieces", lambda: {"a": None, "b": 1})()


def test_a_method_that_promises_nothing_is_left_as_it_is():
    assert checked("mine", "step", print) is print
