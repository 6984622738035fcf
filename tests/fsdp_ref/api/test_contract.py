"""What a composable API leaves on a module, and what it may not do."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fsdp_ref.api.contract import ContractState, _get_registry, contract
from fsdp_ref.errors import FsdpTypeError


class State(ContractState):
    pass


@contract(state_cls=State)
def first_api(module, value=0):
    first_api.state(module).value = value
    return module


@contract()
def second_api(module):
    return None


@pytest.mark.covers("CON-01")
def test_state_is_none_before_and_fresh_for_each_module():
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    assert first_api.state(a) is None
    assert first_api(a, value=3) is a
    assert first_api(module=b, value=4) is b
    assert (first_api.state(a).value, first_api.state(b).value) == (3, 4)
    assert type(first_api.state(a)) is State


@pytest.mark.covers("CON-02", "COMP-16")
def test_twice_on_one_module_is_refused():
    module = nn.Linear(2, 2)
    first_api(module)
    with pytest.raises(AssertionError, match="first_api has already been applied to the following module"):
        first_api(module)
    second_api(module)


@pytest.mark.covers("CON-03")
def test_changed_names_are_refused_with_both_differences():
    @contract()
    def adds(module):
        module.extra = nn.Parameter(torch.zeros(1))

    @contract()
    def buffers(module):
        module.register_buffer("b", torch.zeros(1))

    @contract()
    def wraps(module):
        return nn.Sequential(module)

    pattern = "Checking parameters: Composable distributed API implementations cannot modify FQNs."
    with pytest.raises(RuntimeError, match=pattern) as info:
        adds(nn.Linear(2, 2))
    assert "only after: ['extra']" in str(info.value)
    with pytest.raises(RuntimeError, match=pattern) as info:
        wraps(nn.Linear(2, 2))
    assert "only before: ['weight', 'bias'], only after: ['0.weight', '0.bias']" in str(info.value)
    assert "Checking modules" in str(info.value)
    with pytest.raises(RuntimeError, match="Checking buffers"):
        buffers(nn.Linear(2, 2))


@pytest.mark.covers("CON-03")
def test_a_changed_order_is_refused():
    @contract()
    def reorders(module):
        weight = module.weight
        del module.weight
        module.weight = weight

    with pytest.raises(RuntimeError, match=r"order \['weight', 'bias'\] became \['bias', 'weight'\]"):
        reorders(nn.Linear(2, 2))


@pytest.mark.covers("CON-04")
def test_none_means_the_same_module_and_the_registry_keeps_order():
    module = nn.Linear(2, 2)
    assert _get_registry(module) is None
    assert second_api(module) is module
    first_api(module)
    assert list(_get_registry(module)) == ["second_api", "first_api"]
    assert list(module.state_dict()) == ["weight", "bias"]
    assert list(module._modules) == []


@pytest.mark.covers("CON-05")
def test_a_copy_of_an_annotated_module_trains_identically():
    torch.manual_seed(0)
    module = nn.Linear(2, 2)
    calls = []
    module.register_forward_hook(lambda *_: calls.append(1))
    first_api(module)
    twin = copy.deepcopy(module)
    x = torch.ones(1, 2)
    module(x).sum().backward()
    twin(x).sum().backward()
    assert torch.equal(module.weight.grad, twin.weight.grad)
    assert len(calls) == 2
    assert first_api.state(twin) is not first_api.state(module)
    assert list(_get_registry(twin)) == ["first_api"]


@pytest.mark.covers("CON-06")
def test_a_list_of_modules_shares_one_state():
    modules = [nn.Linear(2, 2), nn.Linear(2, 2)]
    assert second_api(modules) is modules
    assert second_api.state(modules[0]) is second_api.state(modules[1]) is not None
    with pytest.raises(AssertionError, match="already been applied"):
        second_api([nn.Linear(2, 2), modules[0]])


def test_a_refused_application_leaves_no_trace():
    @contract()
    def fails(module):
        raise ValueError("bad argument")

    module = nn.Linear(2, 2)
    for _ in range(2):
        with pytest.raises(ValueError, match="bad argument"):
            fails(module)
    assert fails.state(module) is None


@pytest.mark.parametrize("value", [3, None, "module", [], [nn.Linear(2, 2), 4]])
def test_something_that_is_no_module_is_refused(value):
    with pytest.raises(FsdpTypeError, match="second_api: expected a module or a list of modules"):
        second_api(value)
