"""Which unit owns which parameter, in which order units are made and listed."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fsdp_ref.annotations import set_unit
from fsdp_ref.build.ignored import Ignored, resolve_ignored
from fsdp_ref.build.plan import check_frozen, make_plan
from fsdp_ref.build.targets import Targets, choose_targets
from fsdp_ref.errors import FsdpValueError
from fsdp_ref.storage.views import mark_flattened
from fsdp_ref.wrap import ModuleWrapPolicy


def lin(n: int = 2) -> nn.Linear:
    return nn.Linear(n, n, bias=False)


class Node(nn.Module):
    """A module with one parameter and named children."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        self.w = nn.Parameter(lin().weight.detach())
        for name, child in children.items():
            self.add_module(name, child)


def plan_for(root, *units, ignored=None, **more):
    targets = Targets({unit: {"who": "nested"} for unit in units})
    return make_plan(root, targets, {"who": "root"}, ignored or Ignored(), **more)


def owners(plan):
    return {unit.fqn: [param.fqn for param in unit.params] for unit in plan.units}


@pytest.mark.covers("COMP-05", "COMP-06")
def test_units_are_listed_depth_first_and_made_in_reverse():
    root = Node(s1=Node(), s2=Node(ss=Node()))
    plan = plan_for(root, root.s2.ss, root.s1, root.s2)
    assert [unit.fqn for unit in plan.units] == ["", "s1", "s2", "s2.ss"]
    assert plan.root.options == {"who": "root"}
    assert plan.units[1].options == {"who": "nested"}


@pytest.mark.covers("COMP-05", "COMP-19", "WRAP-15")
def test_every_module_belongs_to_the_nearest_unit():
    root = Node(a=nn.Sequential(lin(), nn.Sequential(lin())), b=Node(c=nn.Sequential(lin())))
    plan = plan_for(root, root.a, root.b)
    assert owners(plan) == {"": ["w"], "a": ["0.weight", "1.0.weight"], "b": ["w", "c.0.weight"]}
    modules = {unit.fqn: set(unit.modules) for unit in plan.units}
    assert modules == {"": {root}, "a": set(root.a.modules()), "b": set(root.b.modules())}
    assert set.union(*modules.values()) == set(root.modules())


@pytest.mark.covers("SHR-01")
def test_a_tie_inside_one_unit_is_one_parameter_with_two_sites():
    root = Node(a=lin(), b=lin())
    root.b.weight = root.a.weight
    (_, tied) = plan_for(root).root.params
    assert (tied.fqn, tied.aliases) == ("a.weight", ("b.weight",))
    assert [(site.module, site.name) for site in tied.sites] == [(root.a, "weight"), (root.b, "weight")]


@pytest.mark.covers("SHR-05", "SHR-03")
def test_a_tie_between_parent_and_child_belongs_to_the_parent():
    root = Node(a=lin())
    root.w = root.a.weight
    plan = plan_for(root, root.a)
    assert owners(plan) == {"": ["w"], "a": []}
    assert plan.root.params[0].aliases == ("a.weight",)


@pytest.mark.covers("SHR-06", "SHR-03", "B082")
def test_a_tie_between_cousins_belongs_to_their_lowest_common_unit():
    mid = Node(left=Node(x=lin()), right=Node(y=lin()))
    root = Node(mid=mid, other=Node())
    mid.left.x.weight = mid.right.y.weight
    plan = plan_for(root, mid, mid.left, mid.right, mid.left.x, root.other)
    assert owners(plan)["mid"] == ["w", "left.x.weight"]
    assert owners(plan)["mid.left.x"] == []
    assert "y.weight" not in owners(plan)["mid.right"]
    # Without a unit at the common ancestor the nearest unit above it owns the parameter.
    promoted = plan_for(root, mid.left, mid.right)
    assert "mid.left.x.weight" in owners(promoted)[""]


@pytest.mark.covers("SHR-07")
def test_a_three_way_tie_is_flattened_once_and_ignored_ties_not_at_all():
    root = Node(a=Node(x=lin()), b=Node(x=lin()), c=Node(x=lin()))
    root.b.x.weight = root.c.x.weight = root.a.x.weight
    plan = plan_for(root, root.a, root.b, root.c)
    tied = [param for unit in plan.units for param in unit.params if param.aliases]
    assert [(p.fqn, p.aliases) for p in tied] == [("a.x.weight", ("b.x.weight", "c.x.weight"))]
    assert len(tied[0].aliases) == 2
    ignored = Ignored(params=frozenset({root.a.x.weight}))
    assert owners(plan_for(root, root.a, root.b, root.c, ignored=ignored)) == {
        "": ["w"],
        "a": ["w"],
        "b": ["w"],
        "c": ["w"],
    }


@pytest.mark.covers("SHR-04", "TRAV-04", "B081")
def test_a_module_that_occurs_twice_gives_one_site_with_two_names():
    shared = lin()
    root = Node(a=nn.Sequential(shared), b=nn.Sequential(shared))
    tied = plan_for(root).root.params[1]
    assert (tied.fqn, tied.aliases, len(tied.sites)) == ("a.0.weight", ("b.0.weight",), 1)
    assert plan_for(root).root.modules == (root, root.a, shared, root.b)
    inside = plan_for(root, shared)
    assert owners(inside) == {"": ["w"], "a.0": ["weight"]}
    assert inside.units[1].params[0].aliases == ()


@pytest.mark.covers("SHR-03", "B082", "B139")
def test_a_tie_with_a_unit_made_before_is_refused_by_name():
    root = Node(a=lin(), b=lin(), c=lin())
    root.b.weight = root.c.weight = root.a.weight
    mark_flattened(root.a.weight, sharded=True)
    nothing = SimpleNamespace(originals=SimpleNamespace(params=()), fqns=())
    set_unit(root.a, SimpleNamespace(handle=nothing))
    with pytest.raises(FsdpValueError, match=r"b\.weight \(for the root unit, .*\), c\.weight \(for"):
        plan_for(root)


@pytest.mark.covers("COMP-07", "B011", "IGN-04")
def test_units_made_before_keep_their_parameters():
    root = Node(a=Node(b=lin()), c=lin())
    set_unit(root.a, object())
    for param in root.a.parameters():
        mark_flattened(param, sharded=True)
    plan = plan_for(root)
    assert owners(plan) == {"": ["w", "c.weight"]}
    assert root.a not in plan.root.modules


@pytest.mark.covers("CTOR-20")
def test_a_unit_around_a_unit_holds_nothing():
    root = Node(a=lin())
    set_unit(root, object())
    for param in root.parameters():
        mark_flattened(param, sharded=True)
    assert owners(plan_for(root)) == {"": []}


@pytest.mark.covers("REP-01", "TRAV-03", "B010")
def test_a_replicated_subtree_is_left_alone_with_the_units_in_it():
    from fsdp_ref.annotations import register

    root = Node(r=Node(inner=lin()), c=lin())
    register(root.r, "replicate", object())
    ignored = resolve_ignored(root)
    assert ignored.modules == {root.r, root.r.inner}
    assert owners(plan_for(root, root.r.inner, ignored=ignored)) == {"": ["w", "c.weight"]}
    assert owners(plan_for(root, root.r.inner)) == {"": ["w", "c.weight"]}


@pytest.mark.covers("IGN-01", "IGN-09", "B067")
def test_ignored_modules_and_parameters_go_to_no_unit():
    root = Node(a=Node(b=lin()), c=Node(d=lin()))
    ignored = resolve_ignored(root, ignored_modules=[root.a])
    assert owners(plan_for(root, root.c, ignored=ignored)) == {"": ["w"], "c": ["w", "d.weight"]}
    states = resolve_ignored(root, ignored_states=[root.c.d.weight, root.w])
    assert owners(plan_for(root, root.c, ignored=states)) == {"": ["a.w", "a.b.weight"], "c": ["w"]}


@pytest.mark.covers("IGN-03")
def test_an_ignored_root_owns_nothing():
    root = Node(a=lin())
    with pytest.warns(UserWarning, match="Trying to ignore the top-level module"):
        ignored = resolve_ignored(root, ignored_modules=[root])
    assert owners(plan_for(root, ignored=ignored)) == {"": []}


@pytest.mark.covers("FLAT-01", "B015")
def test_names_are_relative_to_the_unit_and_follow_named_modules():
    root = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))), nn.Linear(2, 2))
    plan = plan_for(root, root[0])
    assert owners(plan) == {"": ["1.weight", "1.bias"], "0": ["0.weight", "0.bias", "1.0.weight", "1.0.bias"]}
    below = {f"{unit.fqn}.{fqn}".lstrip(".") for unit in plan.units for fqn in owners(plan)[unit.fqn]}
    assert below == {name for name, _ in root.named_parameters()}


@pytest.mark.covers("CTOR-04")
def test_a_module_without_parameters_is_a_unit_without_parameters():
    assert owners(plan_for(nn.ReLU())) == {"": []}


@pytest.mark.covers("WRAP-12", "WRAP-13")
def test_mixed_frozen_units_are_named_in_post_order():
    root = nn.Sequential(nn.Sequential(lin(), lin()), nn.Sequential(lin(), lin()))
    for block in root:
        block[0].weight.requires_grad_(False)
    plan = plan_for(root, root[0], root[1])
    with pytest.raises(FsdpValueError, match=r"^0 has both parameters with requires_grad=True and False\.") as info:
        check_frozen(plan, use_orig_params=False)
    assert "requires_grad=True:\n['0.1.weight']" in str(info.value)
    assert "requires_grad=False:\n['0.0.weight']" in str(info.value)
    assert "1 has both" in str(info.value), "every offender is listed"
    with pytest.warns(UserWarning, match="gradient memory usage will be higher") as caught:
        check_frozen(plan, use_orig_params=True)
    assert [str(w.message).split(" ")[0] for w in caught] == ["0", "1"]


@pytest.mark.covers("WRAP-13")
def test_ignored_parameters_and_nested_units_do_not_make_a_unit_mixed():
    root = nn.Sequential(nn.Sequential(lin(), nn.Sequential(lin())))
    root[0][0].weight.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_frozen(plan_for(root, root[0], root[0][1]), use_orig_params=False)
        ignored = Ignored(params=frozenset({root[0][0].weight}))
        check_frozen(plan_for(root, root[0], ignored=ignored), use_orig_params=False)
    with pytest.raises(FsdpValueError, match="^0 has both"):
        check_frozen(plan_for(root, root[0]), use_orig_params=False)


@pytest.mark.covers("WRAP-12")
def test_a_mixed_root_is_the_flattening_checks_business():
    root = Node(a=lin())
    root.w.requires_grad_(False)
    root.add_module("b", lin())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_frozen(plan_for(root, root.a), use_orig_params=False)


@pytest.mark.covers("WRAP-13")
def test_post_order_reports_the_child_before_its_parent_and_siblings_as_registered():
    root = nn.Sequential(Node(s=Node(x=lin()), t=Node(x=lin())))
    for unit in (root[0].s, root[0].t, root[0]):
        unit.w.requires_grad_(False)
    root[0].add_module("y", lin())
    plan = plan_for(root, root[0], root[0].s, root[0].t)
    with pytest.warns(UserWarning, match="has both") as caught:
        check_frozen(plan, use_orig_params=True)
    assert [str(w.message).split(" ")[0] for w in caught] == ["0.s", "0.t", "0"]


@st.composite
def trees(draw, depth: int = 3) -> nn.Module:
    node = Node()
    if depth:
        for index in range(draw(st.integers(0, 3))):
            node.add_module(f"c{index}", draw(trees(depth=depth - 1)))
    return node


@settings(deadline=None, max_examples=100)
@given(trees(), st.data())
def test_any_tree_any_units_any_ties(root, data):
    modules = [module for module in root.modules() if module is not root]
    if modules:
        for _ in range(data.draw(st.integers(0, 3))):
            a, b = data.draw(st.sampled_from(modules)), data.draw(st.sampled_from(modules))
            a.w = b.w
    units = data.draw(st.lists(st.sampled_from(modules), unique=True)) if modules else []
    plan = plan_for(root, *units)
    listed = [unit.module for unit in plan.units]
    assert listed == [module for module in root.modules() if module is root or module in units]
    flattened = [param.param for unit in plan.units for param in unit.params]
    assert len(flattened) == len(set(flattened))
    assert set(flattened) == set(root.parameters())
    # By definition: the deepest unit whose subtree contains every place that holds the parameter.
    for unit in plan.units:
        for planned in unit.params:
            places = [module for module in root.modules() if module.w is planned.param]
            holders = [u for u in listed if all(place in set(u.modules()) for place in places)]
            assert unit.module is min(holders, key=lambda u: len(list(u.modules())))
            for name in (planned.fqn, *planned.aliases):
                assert unit.module.get_parameter(name) is planned.param
            assert {site.module for site in planned.sites} == set(places)


@pytest.mark.covers("COMP-04")
def test_policies_and_hand_made_targets_give_the_same_plan():
    root = Node(a=Node(b=lin()), c=Node(d=lin()))
    targets = choose_targets(root, ModuleWrapPolicy({nn.Linear}), {"who": "root"}, Ignored())
    by_policy = make_plan(root, targets, {"who": "root"}, Ignored())
    assert owners(by_policy) == owners(plan_for(root, root.a.b, root.c.d))
