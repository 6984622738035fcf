"""Names with and without wrappers."""

from __future__ import annotations

import pytest

from fsdp_ref.naming import clean_tensor_name, join_fqn, without_wrappers
from fsdp_ref.torch_names.traversal import replace_prefix


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


@pytest.mark.covers("TRAV-07")
def test_replacing_a_prefix_renames_only_keys_that_start_with_it_and_can_be_undone():
    state = {"a.x": 1, "b.a.x": 2, "a.y": 3}
    replace_prefix(state, "a.", "c.a.")
    assert list(state.items()) == [("c.a.x", 1), ("b.a.x", 2), ("c.a.y", 3)]
    replace_prefix(state, "c.a.", "a.")
    assert list(state.items()) == [("a.x", 1), ("b.a.x", 2), ("a.y", 3)]
    with pytest.raises(ValueError, match="two different prefixes"):
        replace_prefix(state, "a.", "a.")


def test_joining_leaves_no_stray_dot():
    assert [join_fqn("", "w"), join_fqn("a", "w"), join_fqn("a", "")] == ["w", "a.w", "a"]
