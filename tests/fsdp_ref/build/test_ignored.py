"""The two ways of saying what to ignore, and what is refused."""

from __future__ import annotations

import pytest
from torch import nn

from fsdp_ref.annotations import set_unit
from fsdp_ref.build.ignored import Ignored, resolve_ignored


def model():
    return nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 2))


@pytest.mark.covers("IGN-01")
def test_descendants_are_ignored_too():
    root = model()
    ignored = resolve_ignored(root, ignored_modules=[root[0]])
    assert ignored.modules == set(root[0].modules())
    assert ignored.params == set(root[0].parameters())


@pytest.mark.covers("IGN-02")
def test_states_may_be_parameters_or_modules_but_not_both():
    root = model()
    assert resolve_ignored(root, ignored_states=[root[1].weight]).params == {root[1].weight}
    assert resolve_ignored(root, ignored_states=[root[1].weight]).modules == set()
    assert resolve_ignored(root, ignored_states=[root[1]]).params == set(root[1].parameters())
    assert resolve_ignored(root, ignored_states=[]) == Ignored()
    with pytest.raises(ValueError, match=r"expects all nn.Parameter or all nn.Module list elements.*Linear.*Parameter"):
        resolve_ignored(root, ignored_states=[root[1].weight, root[1]])
    with pytest.raises(ValueError, match="Cannot pass both"):
        resolve_ignored(root, ignored_modules=[], ignored_states=[])


@pytest.mark.covers("IGN-02")
@pytest.mark.parametrize(("argument", "error"), [(3, TypeError), ([nn.Linear], ValueError), (["0"], ValueError)])
def test_wrong_ignored_modules_are_refused(argument, error):
    with pytest.raises(error, match="ignored_modules"):
        resolve_ignored(model(), ignored_modules=argument)


@pytest.mark.covers("IGN-02")
def test_parameters_as_ignored_modules_are_refused():
    root = model()
    with pytest.raises(ValueError, match="expects nn.Module list elements"):
        resolve_ignored(root, ignored_modules=[root[1].weight])


@pytest.mark.covers("IGN-03")
def test_units_and_the_root_as_ignored_modules():
    root = model()
    set_unit(root[0], object())
    with pytest.raises(ValueError, match="should not include FSDP modules"):
        resolve_ignored(root, ignored_modules=[root[0]])
    with pytest.warns(UserWarning, match="Trying to ignore the top-level module"):
        resolve_ignored(root, ignored_modules=[root])


@pytest.mark.covers("IGN-04")
def test_a_unit_inside_an_ignored_module_is_not_ignored():
    root = model()
    set_unit(root[0][0], object())
    ignored = resolve_ignored(root, ignored_modules=[root[0]])
    assert root[0][0] not in ignored.modules
    assert not ignored.params & set(root[0][0].parameters())


@pytest.mark.covers("IGN-05")
def test_a_parent_takes_over_what_nested_units_ignore():
    root = model()
    nested = [resolve_ignored(root[0], ignored_modules=[root[0][0]]), Ignored(params=frozenset({root[1].bias}))]
    ignored = resolve_ignored(root).union(nested)
    assert ignored.modules == {root[0][0]}
    assert ignored.params == {*root[0][0].parameters(), root[1].bias}


@pytest.mark.covers("IGN-06")
def test_generators_and_modules_from_elsewhere():
    root, other = model(), nn.Linear(2, 2)
    ignored = resolve_ignored(root, ignored_modules=(module for module in [root[1], other]))
    assert ignored.modules == {root[1], other}
    assert resolve_ignored(root, ignored_states=(p for p in root[1].parameters())).params == set(root[1].parameters())
