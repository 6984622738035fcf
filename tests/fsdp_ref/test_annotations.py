"""Where units are and what parameters are called."""

from __future__ import annotations

import pytest
from torch import nn

from fsdp_ref.annotations import register, set_unit, units_in, units_under, unregister


@pytest.mark.covers("TRAV-01", "TRAV-02", "TRAV-04")
def test_units_come_depth_first_and_once():
    shared = nn.Linear(2, 2)
    root = nn.Sequential(nn.Sequential(shared), nn.Linear(2, 2), nn.Sequential(shared))
    for module in (root, root[0], shared, root[1]):
        set_unit(module, f"unit {id(module)}")
    assert [called for _, called, _ in units_under(root)] == [root, root[0], shared, root[1]]
    assert [name for name, _, _ in units_under(root)] == ["", "0", "0.0", "1"]
    assert units_in(root) == [f"unit {id(module)}" for module in (root, root[0], shared, root[1])]


@pytest.mark.covers("TRAV-03", "REP-01")
def test_replicated_subtrees_are_not_entered():
    root = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    for module in (root[0][0], root[1]):
        set_unit(module, object())
    register(root[0], "replicate", object())
    assert [called for _, called, _ in units_under(root)] == [root[1]]
    assert units_under(root[0]) == []


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
