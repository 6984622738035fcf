"""Layouts over the tensor-parallel axis are drawn for every kind of module, and mean something where they stand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from fsdp_testing.adapters import registry
from fsdp_testing.cases.drawing import CaseDrawer, Scope, SeededChoices, legal_case, needs_of_case
from fsdp_testing.cases.drawing.layouts import legal_layouts
from fsdp_testing.cases.records import Case
from fsdp_testing.cases.records.specs import LAYOUTS
from fsdp_testing.errors import InvalidArgument

CLAIMED = registry.load("fsdp_ref-composable").claimed(2)
OVER_TWO_AXES = Scope(CLAIMED, (4,), tensor_parallel=2)


def node(name: str, **fields: Any) -> dict[str, Any]:
    return {"kind": "linear", "name": name, "out": 4, **fields}


def tree(*nodes: dict[str, Any]) -> dict[str, Any]:
    return {"width": 4, "nodes": list(nodes)}


def drawn(count: int) -> list[Case]:
    drawer = CaseDrawer(OVER_TWO_AXES)
    return [drawer.draw(SeededChoices(seed)) for seed in range(count)]


def test_drawn_cases_are_legal_survive_their_document_and_have_every_layout():
    kinds: Counter[str] = Counter()
    for case in drawn(440):
        assert legal_case(case, CLAIMED) == case
        assert Case.from_json(case.to_json()) == case
        assert case.world.replicas == case.world.tensor_parallel == 2
        assert "tensor_parallel" in needs_of_case(case) <= CLAIMED
        # Inputs are drawn for the ranks that have inputs of their own.
        assert all(len(batch.rows) <= 2 for one in case.program for batch in one.batches())
        kinds.update({layout for _, layout in case.wrapping.layouts} or {"none"})
    assert set(kinds) == {*LAYOUTS, "none"}
    assert kinds.total() - kinds["none"] > 400


def test_without_the_axis_no_case_has_layouts():
    drawer = CaseDrawer(Scope(CLAIMED))
    assert not any(drawer.draw(SeededChoices(seed)).wrapping.layouts for seed in range(100))
    case = drawn(20)[-1]
    assert legal_layouts((("a", "replicated"),), case.model.tree, (), 1) == ()


@pytest.mark.parametrize(
    ("asked", "nodes", "legal"),
    [
        # A pair stays one where the second takes the columns of the first at once.
        ({"a": "colwise_cut", "b": "rowwise_cut"}, [node("a"), node("b")], {"a": "colwise_cut", "b": "rowwise_cut"}),
        ({"a": "colwise_cut", "b": "rowwise"}, [node("a"), node("b")], {"a": "colwise", "b": "rowwise"}),
        ({"a": "rowwise_cut", "b": "colwise_cut"}, [node("a"), node("b")], {"a": "rowwise", "b": "colwise"}),
        (
            {"a": "colwise_cut", "b": "rowwise_cut"},
            [node("a"), {"kind": "dropout", "name": "d"}, node("b")],
            {"a": "colwise", "b": "rowwise"},
        ),
        ({"a": "colwise_cut", "b": "rowwise_cut"}, [node("a", out=3), node("b")], {"a": "colwise", "b": "rowwise"}),
        (
            {"a": "colwise_cut", "b": "rowwise_cut"},
            [node("a"), node("b"), {"kind": "again", "name": "c", "of": "b"}],
            {"a": "colwise", "b": "rowwise"},
        ),
        # One parameter has one layout: the first module's.
        (
            {"a": "colwise", "b": "rowwise"},
            [node("a", tie="t"), node("b", tie="t")],
            {"a": "colwise", "b": "colwise"},
        ),
        ({"b": "rowwise"}, [node("a", tie="t"), node("b", tie="t")], {}),
        # What torch cannot make of a kind of module is dropped, and so is what stays outside.
        ({"n": "colwise", "a": "sequence"}, [{"kind": "norm", "name": "n"}, node("a")], {}),
        ({"s": "sequence"}, [{"kind": "scale", "name": "s", "shape": "one"}, node("a")], {}),
        ({"e": "rowwise"}, [{"kind": "embed", "name": "e", "rows": 1}, node("a")], {}),
        ({"e": "rowwise"}, [{"kind": "embed", "name": "e", "rows": 3}, node("a")], {"e": "rowwise"}),
        ({"gone": "replicated", "a": "replicated"}, [node("a")], {"a": "replicated"}),
        ({"a": "colwise", "b": "rowwise"}, [node("a", frozen="all"), node("b")], {"b": "rowwise"}),
    ],
)
def test_what_has_no_meaning_is_dropped(asked: dict[str, str], nodes: list[Any], legal: dict[str, str]):
    ignored = [one["name"] for one in nodes if one.get("frozen")]
    found = legal_layouts(tuple(asked.items()), tree(*nodes), ignored, 2)
    assert dict(found) == legal
    assert legal_layouts(found, tree(*nodes), ignored, 2) == found


@pytest.mark.parametrize(
    ("name", "sizes", "said"),
    [("torch-fsdp2", (4, 3), r"divides every world size, got 2 for \[3\]"), ("torch-ddp", (4,), "claims `tensor_par")],
)
def test_a_scope_that_cannot_be_is_refused(name: str, sizes: tuple[int, ...], said: str):
    with pytest.raises(InvalidArgument, match=said):
        Scope(registry.load(name).claimed(2), sizes, tensor_parallel=2)
