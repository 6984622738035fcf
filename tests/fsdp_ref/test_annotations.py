"""Where units are and what parameters are called."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from fsdp_ref.annotations import register, set_unit, units_in, units_under, unregister
from fsdp_ref.torch_names.traversal import _get_fsdp_states_with_modules, _get_param_to_fqns


@pytest.mark.covers("TRAV-01", "TRAV-02", "TRAV-04")
def test_units_come_depth_first_and_once():
    shared = nn.Linear(2, 2)
    root = nn.Sequential(nn.Sequential(shared), nn.Linear(2, 2), nn.Sequential(shared))
    for module in (root, root[0], shared, root[1]):
        set_unit(module, f"unit {id(module)}")
    assert _get_fsdp_states_with_modules(root)[1] == [root, root[0], shared, root[1]]
    assert [name for name, _, _ in units_under(root)] == ["", "0", "0.0", "1"]
    assert units_in(root) == [f"unit {id(module)}" for module in (root, root[0], shared, root[1])]


@pytest.mark.covers("TRAV-03", "REP-01")
def test_replicated_subtrees_are_not_entered():
    root = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    for module in (root[0][0], root[1]):
        set_unit(module, object())
    register(root[0], "replicate", object())
    assert _get_fsdp_states_with_modules(root)[1] == [root[1]]
    assert _get_fsdp_states_with_modules(root[0])[1] == []


@pytest.mark.covers("TRAV-05")
def test_parameters_map_to_clean_names():
    root = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    root[1].weight = root[0].weight
    assert _get_param_to_fqns(root) == {root[0].weight: ["0.weight"]}
    assert _get_param_to_fqns(root, dedup_shared=False) == {root[0].weight: ["0.weight", "1.weight"]}


@pytest.mark.covers("TRAV-05")
def test_a_flat_parameter_maps_to_the_names_it_holds():
    inner = nn.Module()
    inner._flat_param = nn.Parameter(nn.Linear(2, 2).weight.detach().reshape(-1))
    root = nn.Module()
    root.add_module("block", nn.Module())
    root.block.add_module("_fsdp_wrapped_module", inner)
    handle = SimpleNamespace(flat_param=inner._flat_param, fqns=["l.weight", "l.bias"])
    set_unit(root.block, SimpleNamespace(handle=handle))
    assert _get_param_to_fqns(root) == {inner._flat_param: ["block.l.weight", "block.l.bias"]}


def test_a_unit_does_not_show_in_the_module_itself():
    module = nn.Linear(2, 2)
    set_unit(module, nn.Linear(1, 1))
    assert list(module.state_dict()) == ["weight", "bias"]
    assert list(module.children()) == []


def test_an_application_that_is_taken_back_leaves_nothing():
    module = nn.Linear(2, 2)
    before = dict(vars(module))
    register(module, "mine", object())
    register(module, "other", object())
    unregister(module, "mine")
    assert "_fsdp_ref_registry" in vars(module)
    unregister(module, "other")
    unregister(module, "other")
    assert vars(module) == before
