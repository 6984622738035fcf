"""An adapter is completed: what is missing is filled in, or said plainly."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fsdp_testing.adapters.adapter import Adapter, TorchStyle
from fsdp_testing.adapters.defaults import OPTIONAL_WITHOUT_DEFAULT
from fsdp_testing.adapters.protocol import METHODS_OF_CAPABILITY, STRATEGIES, Precision
from fsdp_testing.cases import records
from fsdp_testing.errors import InvalidImplementation


def torch_style(**more) -> TorchStyle:
    return TorchStyle(name="x", wrap=lambda module, setup: module, capabilities=frozenset({"no_shard"}), **more)


def test_three_fields_are_enough_and_the_result_is_complete():
    adapter = Adapter.of(torch_style())
    assert adapter.observes_locally
    assert adapter.observes_gradients
    assert adapter.missing >= {"no_sync", "local_pieces", "full_state_dict"}
    assert Adapter.of(adapter) is adapter


def test_any_object_with_the_attributes_will_do():
    plain = SimpleNamespace(name="y", wrap=lambda module, setup: module, capabilities={"no_shard"})
    assert Adapter.of(plain).capabilities == frozenset({"no_shard"})


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (SimpleNamespace(), ["`name` is None", "`capabilities` is NoneType", "`wrap` is not callable"]),
        (SimpleNamespace(name="", wrap=print, capabilities={"a"}), ["`name` is ''"]),
        (SimpleNamespace(name="z", wrap=print, capabilities="no_shard"), ["`capabilities` is str"]),
        (SimpleNamespace(name="z", wrap=print, capabilities={1}), ["not a frozenset of strings"]),
    ],
)
def test_every_missing_requirement_is_listed(broken, message):
    with pytest.raises(InvalidImplementation) as caught:
        Adapter.of(broken)
    assert [part for part in message if part not in str(caught.value)] == []


def test_a_method_that_is_missing_says_its_own_name_when_called():
    adapter = Adapter.of(torch_style())
    for method in OPTIONAL_WITHOUT_DEFAULT:
        with pytest.raises(InvalidImplementation, match=f"'x': expected the method `{method}`"):
            getattr(adapter, method)(nn.Linear(1, 1))
    with pytest.raises(InvalidImplementation, match=r"expected the method `no_sync`.*The model has no `no_sync`"):
        adapter.no_sync(nn.Linear(1, 1))


def test_given_methods_win_over_defaults():
    marker = {"w": ()}
    adapter = Adapter.of(torch_style(local_pieces=lambda model: marker))
    assert adapter.local_pieces(nn.Linear(1, 1)) is marker
    assert "local_pieces" not in adapter.missing


def test_full_parameters_alone_give_observation_through_gathering():
    from contextlib import contextmanager

    model = nn.Linear(2, 3)

    @contextmanager
    def full_parameters(model, *, writeback):
        yield {"weight": model.weight.data, "bias": model.bias.data}

    adapter = Adapter.of(torch_style(full_parameters=full_parameters))
    assert (adapter.observes_locally, adapter.observes_gradients) == (False, False)
    (piece,) = adapter.local_pieces(model)["weight"]
    assert (piece.start, piece.stop, piece.shape) == (0, 6, (3, 2))
    assert piece.value is not None
    assert piece.value.data_ptr() != model.weight.data_ptr()


def test_writeback_through_pieces_reaches_the_parameters_only_when_asked():
    model = nn.Linear(2, 2)
    adapter = Adapter.of(torch_style())
    before = model.weight.detach().clone()
    with adapter.full_parameters(model, writeback=False) as full:
        full["weight"].mul_(2)
    assert torch.equal(model.weight, before)
    with adapter.full_parameters(model, writeback=True) as full:
        full["weight"].mul_(2)
    assert torch.equal(model.weight, before * 2)


def test_the_models_own_clipping_is_preferred():
    class Own(nn.Linear):
        def clip_grad_norm_(self, max_norm, norm_type):
            return torch.tensor(float(max_norm + norm_type))

    adapter = Adapter.of(torch_style())
    assert adapter.clip_grad_norm(Own(1, 1), 3.0, 2.0).item() == 5.0
    plain = nn.Linear(2, 2)
    plain.weight.grad = torch.full((2, 2), 3.0)
    assert adapter.clip_grad_norm(plain, 1.0, float("inf")).item() == 3.0


def test_tags_and_strategies_of_the_protocol_are_those_of_the_records():
    assert set(METHODS_OF_CAPABILITY) <= set(records.CAPABILITIES)
    assert set(STRATEGIES) == set(records.STRATEGIES)


def test_reduce_dtype_is_inferred_from_the_compute_dtype_only_where_it_is_left_out():
    bf16, f32 = torch.bfloat16, torch.float32
    assert Precision().on_the_wire is None
    assert Precision(param_dtype=bf16).on_the_wire == bf16
    assert Precision(param_dtype=bf16, reduce_dtype=f32).on_the_wire == f32
    assert Precision(reduce_dtype=bf16).on_the_wire == bf16


def test_a_dtype_that_no_case_knows_is_refused():
    with pytest.raises(InvalidImplementation, match="expected `widest_dtype` among float64.*got 'fp32'"):
        Adapter.of(torch_style(widest_dtype="fp32"))


def test_a_variant_knows_what_it_is_built_on():
    plain = TorchStyle(name="plain", wrap=lambda m, s: m, capabilities=frozenset({"no_shard"}))
    variant = dataclasses.replace(plain, name="variant")
    assert (Adapter.of(plain).built_on, Adapter.of(variant).built_on) == ("plain", "plain")
    assert dataclasses.replace(Adapter.of(variant), name="another").built_on == "plain"
