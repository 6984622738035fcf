"""Modules are replaced wherever they are registered, and wrapped inside out."""

from __future__ import annotations

import pytest
from torch import nn

from fsdp_testing.adapters.shared import checkpointing
from fsdp_testing.cases.models import MODELS
from fsdp_testing.errors import InvalidArgument


def test_a_module_under_two_names_is_replaced_at_both():
    root = MODELS["registered_twice"].build(0)
    new = nn.Identity()
    checkpointing.replace_module(root, root.get_submodule("layer"), new)
    assert root.get_submodule("layer") is new
    assert root.get_submodule("alias") is new
    assert root.get_submodule("other") is not new


def test_a_wrapper_does_not_come_to_hold_itself():
    root = nn.Sequential(nn.Linear(1, 1))
    wrapper = nn.Sequential(root[0])
    checkpointing.replace_module(root, root[0], wrapper)
    assert root[0] is wrapper
    assert isinstance(wrapper[0], nn.Linear)


def test_inner_modules_come_first_and_each_module_once():
    root = MODELS["deep_nest"].build(0)
    assert [n for n, _ in checkpointing.innermost_first(root, ["inner", "inner.inner.inner", "inner.inner"])] == [
        "inner.inner.inner",
        "inner.inner",
        "inner",
    ]
    twice = MODELS["registered_twice"].build(0)
    assert [n for n, _ in checkpointing.innermost_first(twice, ["layer", "alias"])] == ["layer"]


def test_unknown_units_are_all_named():
    with pytest.raises(InvalidArgument, match=r"\['', 'nope'\]"):
        checkpointing.innermost_first(MODELS["mlp"].build(0), ["", "layers.0", "nope"])


def test_parameters_of_named_modules():
    root = MODELS["mlp"].build(0)
    assert checkpointing.parameters_of(root, ["layers.1"]) == set(root.get_submodule("layers.1").parameters())
