"""Names with and without wrappers."""

from __future__ import annotations

import pytest

from fsdp_ref.naming import clean_tensor_name, without_wrappers


@pytest.mark.covers("TRAV-06", "AC-05")
@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("a.b.weight", "a.b.weight"),
        ("_fsdp_wrapped_module.a.weight", "a.weight"),
        ("a._fsdp_wrapped_module._checkpoint_wrapped_module.b._fsdp_wrapped_module.w", "a.b.w"),
        ("_checkpoint_wrapped_module.weight", "weight"),
        ("my_fsdp_wrapped_module.weight", "my_fsdp_wrapped_module.weight"),
        ("_fsdp_wrapped_module", ""),
    ],
)
def test_wrapper_segments_go_and_nothing_else(name, clean):
    assert clean_tensor_name(name) == clean


def test_only_our_wrappers_segments_go_while_parameters_are_summoned():
    name = "my_fsdp_wrapped_module.a._fsdp_wrapped_module._checkpoint_wrapped_module.w"
    assert without_wrappers(name) == "my_fsdp_wrapped_module.a._checkpoint_wrapped_module.w"
