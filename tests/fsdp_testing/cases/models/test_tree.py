"""Module trees as data: every part does what it says, and deleting any part leaves a legal tree."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fsdp_testing.cases.drawing import CaseDrawer, Scope, SeededChoices
from fsdp_testing.cases.models.tree import check_tree, legal_tree, needs_of, tree_model, unit_names, unit_of
from fsdp_testing.cases.models.tree_schema import CONTAINERS, SCHEMA, parameters
from fsdp_testing.errors import InvalidRecord

LINEAR = {"kind": "linear", "name": "a"}


def tree(*nodes: dict[str, Any], width: int = 4, **fields: Any) -> dict[str, Any]:
    return {"width": width, "nodes": list(nodes), **fields}


def trained(data: dict[str, Any], rows: int = 3, use: tuple[bool, ...] = ()) -> tuple[torch.nn.Module, torch.Tensor]:
    model = tree_model(data)
    module = model.build(5, torch.float64)
    inputs = model.make_input(1, 0, 0, rows, torch.float64, use=use)
    loss = model.loss(module(*inputs.args, **inputs.kwargs))
    if loss.requires_grad:
        loss.backward()
    return module, loss.detach()


def drawn_trees(count: int) -> Iterator[dict[str, Any]]:
    drawer = CaseDrawer(Scope())
    for seed in range(count):
        case = drawer.draw(SeededChoices(seed))
        if case.model.tree is not None:
            yield case.model.tree


def deletions(data: Any) -> Iterator[Any]:
    """Every way to leave out one node or one optional field, anywhere."""
    for place, node in enumerate(data["nodes"]):
        rest = data["nodes"][:place] + data["nodes"][place + 1 :]
        yield {**data, "nodes": rest}
        for field in set(node) - {"kind", "name", "nodes"}:
            changed = {key: value for key, value in node.items() if key != field}
            yield {**data, "nodes": [*data["nodes"][:place], changed, *data["nodes"][place + 1 :]]}
        if node["kind"] == "group":
            for inner in deletions({**node, "nodes": node.get("nodes", [])}):
                yield {**data, "nodes": [*data["nodes"][:place], inner, *data["nodes"][place + 1 :]]}


def test_deleting_any_part_leaves_a_tree_that_builds_and_trains():
    tried = 0
    for data in drawn_trees(60):
        for smaller in deletions(data):
            check_tree(smaller)
            legal = legal_tree(smaller)
            assert legal_tree(legal) == legal
            tried += 1
            if tried % 7 == 0:
                _, loss = trained(legal)
                assert torch.isfinite(loss)
    assert tried > 300


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_every_drawn_tree_trains_on_any_number_of_rows(rows: int):
    for data in drawn_trees(80):
        _, loss = trained(data, rows)
        assert torch.isfinite(loss)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_tree_is_built_in_the_dtype_asked_for_except_where_a_part_says_otherwise(dtype: torch.dtype):
    for data in drawn_trees(80):
        model = tree_model(data)
        own = {spec.fqn: getattr(torch, spec.dtype) for spec in parameters(legal_tree(data)) if spec.dtype}
        for module, usual in ((model.construct(), model.constructed), (model.build(5, dtype), dtype)):
            for name, held in [*module.named_parameters(), *module.named_buffers()]:
                assert not held.is_floating_point() or held.dtype == own.get(name, usual)


def test_what_the_legality_says_of_parameters_is_what_the_module_has():
    for data in drawn_trees(150):
        module = tree_model(data).build(5, torch.float64)
        said = {}
        seen: set[Any] = set()
        for spec in parameters(legal_tree(data)):
            if not spec.tie or spec.tie not in seen:
                said[spec.fqn] = (spec.shape, not spec.frozen, spec.dtype or "float64")
            seen.add(spec.tie)
        held = {
            name: (tuple(p.shape), p.requires_grad, str(p.dtype).removeprefix("torch."))
            for name, p in module.named_parameters()
        }
        assert held == said
        assert set(unit_names(legal_tree(data))) <= {name for name, _ in module.named_modules(remove_duplicate=False)}


def test_a_legal_tree_comes_back_equal_and_is_not_changed():
    for data in drawn_trees(50):
        before = copy.deepcopy(data)
        assert legal_tree(data) == data == before


@pytest.mark.parametrize("container", CONTAINERS)
def test_containers_carry_two_tensors_through_units_and_out(container: str):
    group = {"kind": "group", "name": "g", "nodes": [LINEAR], "returns": container}
    module, loss = trained(tree(group, output=container))
    assert all(p.grad is not None and bool(p.grad.any()) for p in module.parameters())
    assert float(loss) > 0


def test_tied_and_aliased_parts_are_one_object():
    first = {"kind": "linear", "name": "a", "tie": "t"}
    module, _ = trained(tree(first, {**first, "name": "b"}, {"kind": "again", "name": "c", "of": "a"}))
    assert module.get_parameter("a.weight") is module.get_parameter("b.weight")
    assert module.get_submodule("a") is module.get_submodule("c")


def test_parts_of_other_shape_are_not_tied():
    data = tree({"kind": "linear", "name": "a", "tie": "t"}, {"kind": "linear", "name": "b", "tie": "t", "out": 3})
    module, _ = trained(data)
    assert module.get_parameter("a.weight") is not module.get_parameter("b.weight")


def test_a_branch_runs_only_if_the_mask_says_so():
    data = tree({"kind": "group", "name": "g", "nodes": [LINEAR], "branch": 1}, {"kind": "linear", "name": "z"})
    module, _ = trained(data, use=(True, False))
    assert module.get_parameter("g.a.weight").grad is None
    module, _ = trained(data, use=(False, True))
    assert module.get_parameter("g.a.weight").grad is not None


def test_a_dropped_group_runs_and_gets_no_gradient():
    data = tree(
        {
            "kind": "group",
            "name": "g",
            "nodes": [LINEAR, {"kind": "buffer", "name": "n", "style": "counter"}],
            "dropped": True,
        },
        {"kind": "linear", "name": "z"},
    )
    module, _ = trained(data)
    assert module.get_parameter("g.a.weight").grad is None
    assert int(module.get_buffer("g.n.offset")) == 1


def test_a_group_called_twice_counts_twice():
    counter = {"kind": "buffer", "name": "n", "style": "counter"}
    module, _ = trained(tree({"kind": "group", "name": "g", "nodes": [LINEAR, counter], "calls": 2}))
    assert int(module.get_buffer("g.n.offset")) == 2


def test_a_repeated_call_that_cannot_fit_is_dropped():
    wide = {"kind": "linear", "name": "a", "out": 3}
    legal = legal_tree(tree({"kind": "group", "name": "g", "nodes": [wide], "calls": 2, "residual": True}))
    assert legal["nodes"][0] == {"kind": "group", "name": "g", "nodes": [wide]}


def test_strided_parameters_are_not_contiguous():
    module, _ = trained(tree({"kind": "linear", "name": "a", "out": 3, "strided": True}))
    assert not module.get_parameter("a.weight").is_contiguous()


def test_a_tree_without_parameters_gets_one():
    legal = legal_tree(tree({"kind": "dropout", "name": "a"}, {"kind": "scale", "name": "last", "shape": "empty"}))
    assert sum(spec.numel for spec in parameters(legal)) > 0


def test_needs_name_what_is_there():
    scalar = {"kind": "scale", "name": "s", "shape": "scalar"}
    first = {"kind": "linear", "name": "a", "tie": "t"}
    data = legal_tree(tree(scalar, first, {**first, "name": "b"}))
    assert "zero_dim_parameters" in needs_of(data, ())
    assert "shared_across_units" not in needs_of(data, ())
    assert "shared_across_units" in needs_of(data, ("a", "b"))
    assert unit_of("g.a.b", ("g", "g.a")) == "g.a"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([], "expected an object with a list of nodes"),
        ({"width": 4, "nodes": [{"kind": "what", "name": "a"}]}, "nodes\\[0\\].kind"),
        ({"width": 4, "nodes": [{"kind": "linear", "name": "a", "out": "4"}]}, "nodes\\[0\\].out: expected a int"),
        ({"width": 4, "nodes": [{"kind": "linear", "name": "a", "out": 0}]}, "expected 1 to"),
        ({"width": 4, "nodes": [{"kind": "linear", "name": "a", "tail": 1}]}, "\\['tail'\\] besides"),
        ({"width": 4, "nodes": [LINEAR, LINEAR]}, "a valid, unique identifier"),
        ({"width": 4, "nodes": [{"kind": "linear", "name": "a.b"}]}, "a valid, unique identifier"),
        ({"width": 0, "nodes": []}, "width: expected an integer"),
        ({"width": 4, "nodes": [], "output": "heap"}, "output: expected one of"),
        ({"width": 4, "nodes": [{"kind": "group", "name": "g", "returns": "heap"}]}, "returns: expected one of"),
    ],
)
def test_data_that_is_no_tree_is_refused_with_its_place(data: Any, said: str):
    with pytest.raises(InvalidRecord, match=said):
        check_tree(data)


def test_every_kind_of_node_is_drawn():
    def kinds(nodes: list[dict[str, Any]]) -> Iterator[str]:
        for node in nodes:
            yield node["kind"]
            yield from kinds(node.get("nodes", []))

    found = {kind for data in drawn_trees(400) for kind in kinds(data["nodes"])}
    assert found == set(SCHEMA)


def test_who_owns_what_units_share_is_the_implementations_affair():
    """Two units share a float64 weight: it may be theirs, or that of the root, whose other parameters are float32."""
    tied = {"kind": "linear", "out": 2, "tie": "t"}
    inner = {"kind": "group", "name": "b", "nodes": [tied | {"name": "a"}]}
    tree = {"width": 2, "nodes": [inner, tied | {"name": "c"}, {"kind": "linear", "dtype": "float32", "name": "d"}]}
    assert "mixed_dtype_units" in needs_of(tree, ("b", "c"))
    assert "mixed_dtype_units" not in needs_of(tree, ("b", "c", "d"))
    alone = {"width": 2, "nodes": [inner, {"kind": "linear", "dtype": "float32", "name": "d"}]}
    assert "mixed_dtype_units" not in needs_of(alone, ("b",))
