"""The ways in which a case becomes simpler by one part, as steps; the boldest first, so that few attempts go far.

Much simpler cases are tried before single parts are removed: most failures need two operations, the simplest settings and
hardly any model. Trying these at once costs a few attempts; one part at a time costs dozens.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fsdp_testing.cases.models.tree_schema import SCHEMA, get
from fsdp_testing.cases.records import AXES, Case, ModelSpec, WrappingPlan
from fsdp_testing.explain.shrinking.ddmin import Reduction, joined
from fsdp_testing.judging.signature import Signature

Node = dict[str, Any]


def deletions(case: Case) -> Iterator[Reduction]:
    """Yield the case without one of its operations, the last one first."""
    for index in reversed(range(len(case.program))):
        yield Reduction((index,), case.without_operation(index))


_FEW = 6


def pairs(case: Case) -> Iterator[Reduction]:
    """Yield the case without two of its operations: some can only be left out together."""
    length = len(case.program)
    for first in range(length if length > 2 else 0):
        for second in range(first + 1, length if length <= _FEW else min(first + 2, length)):
            yield Reduction((first, second), case.without_operation(second).without_operation(first))


def settings(case: Case) -> Iterator[Reduction]:
    """Yield the case with one of its settings at its simplest."""
    for axis in AXES:
        yield from (Reduction(*step) for step in axis.simpler(case))
    if case.seed:
        yield Reduction(("seed",), replace(case, seed=0))


def operations(case: Case) -> Iterator[Reduction]:
    """Yield the case with one operation simplified."""
    for index, operation in enumerate(case.program):
        for number, simpler in enumerate(operation.simpler()):
            if simpler != operation:
                program = (*case.program[:index], simpler, *case.program[index + 1 :])
                yield Reduction((index, number), replace(case, program=program))


def cuts(case: Case) -> Iterator[Reduction]:
    """Yield the case with one part of its module tree left out."""
    tree = case.model.tree
    for path in _paths(tree["nodes"]) if tree is not None else ():
        yield Reduction(path, replace(case, model=replace(case.model, tree=_with_nodes(tree, path, []))))


def trees(case: Case) -> Iterator[Reduction]:
    """Yield the case with one part of its module tree simplified."""
    tree = case.model.tree
    for key, smaller in _smaller_trees(tree) if tree is not None else ():
        yield Reduction(key, replace(case, model=replace(case.model, tree=smaller)))


_Smaller = tuple[tuple[Any, ...], dict[str, Any]]


def _smaller_trees(tree: dict[str, Any]) -> Iterator[_Smaller]:
    if tree.get("output", "tensor") != "tensor":
        yield ((), "output"), {**tree, "output": "tensor"}
    for path in _paths(tree["nodes"]):
        for what, smaller in _simpler_nodes(tree, path):
            yield (path, what), smaller
    widths = {tree["width"], *(n["out"] for n in _all(tree["nodes"]) if "out" in n)}
    if widths != {2}:
        yield ((), "width 2"), with_width(tree, 2)
        yield ((), "width 3"), with_width(tree, 3)
        yield ((), "width of the input"), {**tree, "width": 2}


def _simpler_nodes(tree: dict[str, Any], path: tuple[int, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    siblings: list[Node] = tree["nodes"]
    for index in path[:-1]:
        siblings = siblings[index]["nodes"]
    node = siblings[path[-1]]
    if node["kind"] == "group":
        yield "inline", _with_nodes(tree, path, _renamed(siblings, path[-1]))
    elif node["kind"] != "linear":
        yield "linear", _with_nodes(tree, path, [{"kind": "linear", "name": node["name"]}])
    for name, default in SCHEMA[node["kind"]].items():
        if name in node and name != "nodes" and node[name] != default:
            yield name, _with_nodes(tree, path, [{key: value for key, value in node.items() if key != name}])


def _renamed(nodes: list[Node], position: int) -> list[Node]:
    """The nodes of a group under names that are free outside it."""
    taken = {node["name"] for index, node in enumerate(nodes) if index != position}
    inner = []
    for node in get(nodes[position], "nodes"):
        name = node["name"]
        while name in taken:
            name += "x"
        taken.add(name)
        inner.append({**node, "name": name})
    return inner


def with_width(tree: dict[str, Any], width: int) -> dict[str, Any]:
    """Return the tree with `width` wherever a width is written down."""
    smaller = copy.deepcopy(tree)
    smaller["width"] = width
    for node in _all(smaller["nodes"]):
        if node["kind"] == "linear":
            node["out"] = width
    return smaller


def _all(nodes: list[Node]) -> Iterator[Node]:
    for node in nodes:
        yield node
        yield from _all(node.get("nodes", []))


def _paths(nodes: list[Node], prefix: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    for index, node in enumerate(nodes):
        yield (*prefix, index)
        yield from _paths(node.get("nodes", []), (*prefix, index))


def _with_nodes(tree: dict[str, Any], path: tuple[int, ...], replacements: list[Node]) -> dict[str, Any]:
    """The tree with other nodes in the place of one of its own."""
    index, *rest = path
    nodes = tree["nodes"]
    made = [_with_nodes(nodes[index], tuple(rest), replacements)] if rest else replacements
    return {**tree, "nodes": [*nodes[:index], *made, *nodes[index + 1 :]]}


_SKELETONS: tuple[tuple[list[Node], tuple[str, ...]], ...] = (
    ([{"kind": "linear", "name": "a", "out": 2}], ()),
    ([{"kind": "linear", "name": "a", "out": 2}, {"kind": "linear", "name": "b", "out": 2}], ("a",)),
    ([{"kind": "linear", "name": "a", "out": 2}, {"kind": "linear", "name": "b", "out": 2}], ("a", "b")),
)
"""Small models on which many failures still show, with their units."""

_LAYOUTS = ((("a", "colwise"), ("b", "rowwise")), (("a", "rowwise"), ("b", "colwise")))
"""Their layouts over a second axis."""


def on_small_models(case: Case) -> Iterator[Case]:
    """Yield the case on a very small model, and with all its settings at their simplest."""
    plain = _plain_settings(case)
    for nodes, units in _SKELETONS:
        model = ModelSpec("tree", dtype=case.model.dtype, tree={"width": 2, "nodes": [dict(node) for node in nodes]})
        if case.model.tree is None or len(case.model.tree["nodes"]) > len(nodes) or case.wrapping.units != units:
            for layouts in _LAYOUTS if case.world.tensor_parallel > 1 else ((),):
                small = replace(case, model=model, wrapping=WrappingPlan(units, layouts=layouts))
                yield _plain_settings(small)
                yield small
    if case.model.tree is not None:
        thin = replace(case.model, tree=with_width(case.model.tree, 2))
        yield _plain_settings(replace(case, model=thin))
        yield replace(case, model=thin)
    yield plain


def _plain_settings(case: Case) -> Case:
    for axis in AXES:
        case = axis.plain(case)
    return case


def beginnings(case: Case, signature: Signature) -> list[Case]:
    """Return the case up to each operation after which the failure may show; the shortest first."""
    length = len(case.program)
    ends = [index + 1 for index, operation in enumerate(case.program) if operation.kind == signature.operation]
    ends = ends or sorted({length // 4, length // 2, 3 * length // 4, length} - {0})
    return [replace(case, program=case.program[:end]) for end in ends]


def minimal_programs(case: Case) -> Iterator[Case]:
    """Yield the case with its last operation alone, and with one other before it."""
    if len(case.program) > 2:
        *before, last = case.program
        yield replace(case, program=(last,))
        for operation in reversed(before):
            yield replace(case, program=(operation, last))


def minimal_programs_of_beginnings(case: Case, signature: Signature) -> Iterator[Case]:
    """Yield the minimal programs of all beginnings, the smallest first."""
    candidates = [candidate for beginning in beginnings(case, signature) for candidate in minimal_programs(beginning)]
    yield from sorted(candidates, key=lambda candidate: len(candidate.program))


def simplest(case: Case) -> Case:
    """Return the case with all settings and all operations at their simplest."""
    for kind in (settings, operations):
        case = joined(kind, case, [step.key for step in kind(case)])
    return case
