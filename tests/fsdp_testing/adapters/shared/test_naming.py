"""Original names come back from wrapped modules."""

from __future__ import annotations

import pytest
from torch import nn

from fsdp_testing.adapters.shared import naming
from fsdp_testing.cases.models import MODELS


@pytest.mark.parametrize(
    ("wrapped", "plain"),
    [
        ("weight", "weight"),
        ("_fsdp_wrapped_module.layers.0._fsdp_wrapped_module.weight", "layers.0.weight"),
        ("a._checkpoint_wrapped_module._fsdp_wrapped_module.b", "a.b"),
        ("_orig_mod.a.b", "a.b"),
        ("module.a", "module.a"),  # a plain word: only the type of the model can tell that DDP put it there
    ],
)
def test_inserted_components_are_taken_out(wrapped, plain):
    assert naming.original(wrapped) == plain


def test_each_object_comes_once_under_its_first_name():
    tied = MODELS["tied_across"].build(0)
    assert [name for name, _ in naming.named_parameters(tied)] == [name for name, _ in tied.named_parameters()]


def test_a_submodule_called_module_keeps_its_name():
    holder = nn.Module()
    holder.module = nn.Linear(1, 1)
    assert [name for name, _ in naming.named_parameters(holder)] == ["module.weight", "module.bias"]
