"""Which modules a policy chooses, ours and torch's."""

from __future__ import annotations

from functools import partial

import pytest
import torch.distributed.fsdp.wrap as torch_wrap
from torch import nn

from fsdp_ref import wrap as W
from fsdp_ref.build.ignored import Ignored
from fsdp_ref.build.targets import PolicyObject, choose_by_function, choose_targets
from fsdp_ref.config import MixedPrecision
from fsdp_ref.errors import FsdpTypeError, FsdpValueError


def lin(n: int = 5) -> nn.Linear:
    return nn.Linear(n, n)


def names(root, chosen):
    by_module = {module: name for name, module in root.named_modules()}
    return sorted(by_module[module] for module in chosen)


def chosen_by(root, policy, options=None, ignored=None, **more):
    return choose_targets(root, policy, options or {}, ignored or Ignored(), **more)


@pytest.mark.covers("WRAP-01")
@pytest.mark.parametrize("library", [W, torch_wrap], ids=["ours", "torch"])
def test_module_wrap_policy_takes_every_instance_below_the_root(library):
    root = nn.Sequential(nn.Sequential(lin(), lin()), lin())
    policy = library.ModuleWrapPolicy({nn.Linear})
    targets = chosen_by(root, policy, {"a": 1})
    assert names(root, targets.options) == ["0.0", "0.1", "1"]
    assert all(kwargs == {"a": 1} for kwargs in targets.options.values())
    assert targets.by_object
    assert names(root, chosen_by(root, library.ModuleWrapPolicy({nn.Sequential})).options) == ["0"]
    assert policy(lin(), recurse=True)
    assert policy(lin(), recurse=False, nonwrapped_numel=0)
    assert not policy(nn.ReLU(), recurse=False, nonwrapped_numel=0)
    assert "Linear" in repr(policy)


@pytest.mark.covers("WRAP-10")
@pytest.mark.parametrize("library", [W, torch_wrap], ids=["ours", "torch"])
def test_an_override_for_one_module_does_not_reach_another(library):
    root = nn.Sequential(lin(), lin())
    options = {"flag": 0}
    targets = chosen_by(root, library.ModuleWrapPolicy({nn.Linear}), options)
    targets.options[root[0]]["flag"] = 1
    assert targets.options[root[1]] == {"flag": 0}
    assert options == {"flag": 0}


@pytest.mark.covers("WRAP-02")
@pytest.mark.parametrize("library", [W, torch_wrap], ids=["ours", "torch"])
def test_custom_policy_answers(library):
    root = nn.Sequential(lin(), lin(), lin(), lin())
    answers = {root[0]: True, root[1]: {"flag": 2}, root[2]: {}, root[3]: False}
    targets = chosen_by(root, library.CustomPolicy(lambda m: answers.get(m, False)), {"flag": 0, "other": 1})
    assert {root[0]: {"flag": 0, "other": 1}, root[1]: {"flag": 2, "other": 1}} == targets.options
    with pytest.raises(ValueError, match="should return False/True or a kwarg dict"):
        chosen_by(root, library.CustomPolicy(lambda m: 1))


@pytest.mark.covers("WRAP-02")
def test_the_older_name_of_the_custom_policy():
    assert W.LambdaWrapPolicy is W.CustomPolicy


@pytest.mark.covers("WRAP-03")
def test_a_callable_is_asked_to_descend_then_about_the_rest():
    root = nn.Sequential(nn.Sequential(lin(), nn.ReLU()), lin())
    asked = []

    def policy(module, recurse, nonwrapped_numel):
        asked.append((type(module).__name__, recurse, nonwrapped_numel))
        return recurse or isinstance(module, nn.Linear)

    assert names(root, chosen_by(root, policy).options) == ["0.0", "1"]
    # 30 elements in each linear layer; what a unit below holds no longer counts above it.
    assert asked == [
        ("Sequential", True, 60),
        ("Sequential", True, 30),
        ("Linear", True, 30),
        ("Linear", False, 30),
        ("ReLU", True, 0),
        ("ReLU", False, 0),
        ("Sequential", False, 0),
        ("Linear", True, 30),
        ("Linear", False, 30),
    ]


@pytest.mark.covers("WRAP-03")
def test_a_callable_that_does_not_descend_hides_what_is_below():
    root = nn.Sequential(nn.Sequential(lin()), lin())
    policy = lambda module, recurse, nonwrapped_numel: module is not root[0]
    assert names(root, chosen_by(root, policy).options) == ["1"]


@pytest.mark.covers("WRAP-04", "WRAP-05")
@pytest.mark.parametrize("library", [W, torch_wrap], ids=["ours", "torch"])
def test_size_based_policy_of_the_worked_example(library):
    root = nn.Sequential(lin(), lin(), nn.Sequential(lin(), lin()))
    policy = partial(library.size_based_auto_wrap_policy, min_num_params=40)
    assert names(root, chosen_by(root, policy).options) == ["2"]


@pytest.mark.covers("WRAP-04")
def test_size_based_policy_defaults_and_overrides():
    policy = W.size_based_auto_wrap_policy
    assert nn.ModuleList in policy.EXCLUDE_WRAP_MODULES
    assert nn.ModuleDict in policy.EXCLUDE_WRAP_MODULES
    assert {nn.MultiheadAttention} == policy.FORCE_LEAF_MODULES
    assert not policy(lin(), False, 10**8 - 1)
    assert policy(lin(), False, 10**8)
    assert not policy(nn.ModuleList(), False, 10**9)
    assert policy(nn.ModuleList(), False, 10**9, exclude_wrap_modules=set())
    attention = nn.MultiheadAttention(4, 2)
    assert not policy(attention, True, 10**9)
    assert policy(attention, False, 10**9)
    assert policy(attention, True, 10**9, force_leaf_modules=set())
    root = nn.ModuleDict({"list": nn.ModuleList([lin(), lin()]), "attn": nn.MultiheadAttention(8, 2)})
    small = partial(policy, min_num_params=1)
    # A leaf is neither entered nor asked about; a list is entered and never wrapped.
    assert names(root, chosen_by(root, small).options) == ["list.0", "list.1"]


@pytest.mark.covers("WRAP-06")
@pytest.mark.parametrize("library", [W, torch_wrap], ids=["ours", "torch"])
def test_the_other_callable_policies(library):
    root = nn.Sequential(nn.Sequential(lin(), nn.ReLU()), lin())
    assert names(root, chosen_by(root, library.always_wrap_policy).options) == ["0", "0.0", "0.1", "1"]
    by_class = partial(library.transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear})
    assert names(root, chosen_by(root, by_class).options) == ["0.0", "1"]
    by_lambda = partial(library.lambda_auto_wrap_policy, lambda_fn=lambda m: m is root[1])
    assert names(root, chosen_by(root, by_lambda).options) == ["1"]


@pytest.mark.covers("WRAP-16")
def test_or_policy_wraps_when_any_says_so():
    root = nn.Sequential(nn.Sequential(lin(), nn.ReLU()), lin())
    either = partial(
        W._or_policy,
        policies=[
            partial(W.lambda_auto_wrap_policy, lambda_fn=lambda m: m is root[1]),
            partial(W.lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.ReLU)),
        ],
    )
    assert names(root, chosen_by(root, either).options) == ["0.1", "1"]


@pytest.mark.covers("WRAP-08", "IGN-09")
def test_ignored_modules_are_skipped_and_ignored_parameters_do_not_count():
    root = nn.Sequential(lin(), nn.Sequential(lin(), lin()))
    ignored = Ignored(frozenset({root[1][0]}), frozenset(root[1][0].parameters()))
    assert names(root, chosen_by(root, W.ModuleWrapPolicy({nn.Linear}), ignored=ignored).options) == ["0", "1.1"]
    assert names(root, chosen_by(root, W.always_wrap_policy, ignored=ignored).options) == ["0", "1", "1.1"]
    threshold = partial(W.size_based_auto_wrap_policy, min_num_params=40)
    assert names(root, chosen_by(root, threshold).options) == ["1"]
    assert names(root, chosen_by(root, threshold, ignored=ignored).options) == []


@pytest.mark.covers("WRAP-09", "SHR-04", "TRAV-04")
def test_a_shared_module_is_asked_about_once():
    shared = lin()
    root = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared))
    asked = []
    policy = lambda module, recurse, nonwrapped_numel: asked.append((module, recurse)) or True
    chosen = choose_by_function(root, policy, frozenset(), frozenset())
    assert asked.count((shared, False)) == 1
    assert chosen.index(shared) < chosen.index(root[0]), "children come before their parents"


@pytest.mark.covers("WRAP-14")
@pytest.mark.parametrize("object_policy", [True, False])
def test_batch_norms_become_full_precision_units_under_a_policy(object_policy):
    root = nn.Sequential(lin(), nn.BatchNorm1d(5), nn.BatchNorm1d(5))
    policy = (
        W.ModuleWrapPolicy({nn.Linear})
        if object_policy
        else lambda module, recurse, nonwrapped_numel: recurse or isinstance(module, nn.Linear)
    )
    precision = MixedPrecision()
    ignored = Ignored(frozenset({root[2]}))
    with pytest.warns(UserWarning, match="These modules will be wrapped as separate FSDP"):
        options = {"mixed_precision": precision}
        targets = chosen_by(root, policy, options, ignored)
    assert options == {"mixed_precision": precision}, "the root keeps its own precision"
    assert names(root, targets.full_precision) == ["1"]
    assert targets.options[root[1]] == {"mixed_precision": None}
    assert targets.options[root[0]] == {"mixed_precision": precision}


@pytest.mark.covers("WRAP-14")
def test_without_a_policy_or_a_precision_nothing_is_done_about_batch_norms():
    root = nn.Sequential(lin(), nn.BatchNorm1d(5))
    assert chosen_by(root, None, {"mixed_precision": MixedPrecision()}).options == {}
    assert names(root, chosen_by(root, W.ModuleWrapPolicy({nn.Linear})).options) == ["0"]


@pytest.mark.covers("WRAP-11")
def test_wrap_is_identity_outside_and_overrides_inside():
    layer = lin()
    assert W.wrap(layer) is layer
    made = []

    class Box(nn.Module):
        def __init__(self, module, **kwargs):
            super().__init__()
            made.append((module, kwargs))

    with W.enable_wrap(wrapper_cls=Box, a=1, b=2):
        assert isinstance(W.wrap(layer, b=3), Box)
        with (
            pytest.raises(NotImplementedError, match="already within an autowrap context"),
            W.enable_wrap(wrapper_cls=Box),
        ):
            pass
        W.wrap(layer)
    assert made == [(layer, {"a": 1, "b": 3}), (layer, {"a": 1, "b": 2})]
    assert W.wrap(layer) is layer
    with pytest.raises(RuntimeError, match="boom"), W.enable_wrap(wrapper_cls=Box):
        raise RuntimeError("boom")
    assert W.wrap(layer) is layer


@pytest.mark.covers("COMP-02")
def test_what_counts_as_a_policy_object():
    assert isinstance(W.ModuleWrapPolicy({nn.Linear}), PolicyObject)
    assert isinstance(torch_wrap.CustomPolicy(lambda m: True), PolicyObject)
    assert not isinstance(W.always_wrap_policy, PolicyObject)
    with pytest.raises(FsdpTypeError, match="policy object or a callable, got int"):
        chosen_by(lin(), 3)
    with pytest.raises(FsdpTypeError, match="module classes"):
        W.ModuleWrapPolicy([lin()])


@pytest.mark.covers("WRAP-07")
def test_units_that_are_already_there():
    from fsdp_ref.annotations import set_unit

    root = nn.Sequential(nn.Sequential(lin(), lin()), lin())
    set_unit(root[0], object())
    for policy in (W.ModuleWrapPolicy({nn.Linear}), W.always_wrap_policy):
        with pytest.raises(FsdpValueError, match="modules to not already have FSDP applied but found 0"):
            chosen_by(root, policy)
    only = W.CustomPolicy(lambda m: m is root[1])
    assert names(root, chosen_by(root, only, may_hold_units=True).options) == ["1"]
    same = W.ModuleWrapPolicy({nn.Sequential})
    assert chosen_by(root, same, {"a": 1}, may_hold_units=True).options == {}
    with pytest.raises(FsdpValueError, match=r"0\.0 \(chosen by the policy, inside the unit 0\).*0\.1"):
        chosen_by(root, W.ModuleWrapPolicy({nn.Linear}), may_hold_units=True)
    with pytest.raises(FsdpValueError, match=r"0 \(already a unit, with options of its own"):
        chosen_by(root, W.CustomPolicy(lambda m: {"a": 2} if m is root[0] else False), {"a": 1}, may_hold_units=True)
