"""In which ways can a case become simpler? Every way as a case; the boldest first, so that few attempts go far."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from fsdp_testing.records import (
    AssignData,
    Batch,
    Case,
    Clip,
    EditFullParameters,
    Forward,
    ForwardBackward,
    Freeze,
    Interrupt,
    ModelSpec,
    Operation,
    OptimizerSpec,
    Reload,
    ReplaceParameters,
    SeveralForwards,
    Thaw,
    UnshardFirst,
    WorldSpec,
    WrappingPlan,
)
from fsdp_testing.zoo.tree_legality import SCHEMA, get

Node = dict[str, Any]


_SKELETONS: tuple[tuple[list[Node], tuple[str, ...]], ...] = (
    ([{"kind": "linear", "name": "a", "out": 2}], ()),
    ([{"kind": "linear", "name": "a", "out": 2}, {"kind": "linear", "name": "b", "out": 2}], ("a",)),
    ([{"kind": "linear", "name": "a", "out": 2}, {"kind": "linear", "name": "b", "out": 2}], ("a", "b")),
)
"""Small models to which many failures do not mind being moved, with the units that are wrapped."""


def leaps(case: Case) -> Iterator[Case]:
    """Yields the case on a very small model, and with all its settings at their simplest: most failures allow it."""
    plain = _plain_settings(case)
    for nodes, units in _SKELETONS:
        model = ModelSpec("tree", dtype=case.model.dtype, tree={"width": 2, "nodes": [dict(node) for node in nodes]})
        if case.model.tree is None or len(case.model.tree["nodes"]) > len(nodes) or case.wrapping.units != units:
            small = replace(case, model=model, wrapping=WrappingPlan(units))
            yield replace(_plain_settings(small), wrapping=WrappingPlan(units))
            yield small
    yield plain


def _plain_settings(case: Case) -> Case:
    return replace(
        case,
        model=replace(case.model, dtype="float64"),
        world=WorldSpec(case.world.size, case.world.backend),
        mixed_precision=None,
        cpu_offload=False,
        strategy="full_shard" if case.strategy != "no_shard" else "no_shard",
        optimizer=OptimizerSpec("sgd", {"lr": 0.1}),
    )


def programs(case: Case) -> Iterator[Case]:
    """Yields the case with stretches of its program left out: halves, quarters, ..., single operations."""
    length = len(case.program)
    size = length // 2 or 1
    while size:
        for start in range(length - size, -1, -size):
            yield replace(case, program=case.program[:start] + case.program[start + size :])
        size //= 2


def settings(case: Case) -> Iterator[Case]:
    """Yields the case with one of its settings at its simplest."""
    if case.mixed_precision is not None:
        yield replace(case, mixed_precision=None, model=replace(case.model, dtype="float64"))
        for item in fields(case.mixed_precision):
            if getattr(case.mixed_precision, item.name) is not None:
                yield replace(case, mixed_precision=replace(case.mixed_precision, **{item.name: None}))
    elif case.model.dtype != "float64":
        yield replace(case, model=replace(case.model, dtype="float64"))
    yield from _plans(case)
    if case.world.size > 2:
        yield replace(case, world=WorldSpec(2, case.world.backend))
    if case.strategy != "full_shard":
        simpler = "hybrid_shard" if case.strategy == "hybrid_shard_zero2" else "full_shard"
        yield replace(case, strategy="full_shard", world=replace(case.world, mesh=()))
        yield replace(case, strategy=simpler)
    if case.cpu_offload:
        yield replace(case, cpu_offload=False)
    plain = OptimizerSpec("sgd", {"lr": 0.1})
    if case.optimizer != plain:
        yield replace(case, optimizer=plain)
    if case.model.freeze:
        yield replace(case, model=replace(case.model, freeze=()))
    if case.seed:
        yield replace(case, seed=0)


def _plans(case: Case) -> Iterator[Case]:
    if case.wrapping != WrappingPlan():
        yield replace(case, wrapping=WrappingPlan())
        for place in range(len(case.wrapping.units)):
            units = case.wrapping.units[:place] + case.wrapping.units[place + 1 :]
            yield replace(case, wrapping=replace(case.wrapping, units=units))
        if case.wrapping.ignored:
            yield replace(case, wrapping=replace(case.wrapping, ignored=()))


def operations(case: Case) -> Iterator[Case]:
    """Yields the case with one operation simplified."""
    for place, operation in enumerate(case.program):
        for simpler in _simpler(operation):
            if simpler != operation:
                yield replace(case, program=(*case.program[:place], simpler, *case.program[place + 1 :]))


def _simpler(operation: Operation) -> Iterator[Operation]:
    if isinstance(operation, (ForwardBackward, Forward)):
        batch = operation.batch
        yield replace(operation, batch=Batch(batch.seed, (2,)))
        yield replace(operation, batch=replace(batch, usage=()))
        yield replace(operation, batch=replace(batch, usage=batch.usage[:1]))
        yield replace(operation, batch=replace(batch, rows=(2,)))
        yield replace(operation, batch=replace(batch, scale=1.0))
        yield replace(operation, batch=replace(batch, seed=1))
    if isinstance(operation, ForwardBackward) and operation.no_sync:
        yield replace(operation, no_sync=False)
    if isinstance(operation, Forward):
        yield ForwardBackward(operation.batch)
        for mode in ("train", "eval", "no_grad"):
            if mode == operation.mode:
                break
            yield replace(operation, mode=mode)
    if isinstance(operation, (Freeze, Thaw, EditFullParameters)):
        yield replace(operation, patterns=("*",))
    if isinstance(operation, Clip):
        yield Clip(0.5, 2.0)
    yield from _simpler_state_operation(operation)


def _simpler_state_operation(operation: Operation) -> Iterator[Operation]:
    if isinstance(operation, SeveralForwards):
        yield ForwardBackward(operation.micro_batches[0])
        yield replace(operation, micro_batches=operation.micro_batches[:2], reverse=False)
        yield replace(operation, micro_batches=tuple(Batch(batch.seed, (2,)) for batch in operation.micro_batches))
    if isinstance(operation, Reload):
        yield Reload()
        yield replace(operation, units=None)
        yield replace(operation, optimizer=False)
        yield replace(operation, form="full")
    if isinstance(operation, Interrupt):
        yield Interrupt(Batch(operation.batch.seed, (2,)))
        yield replace(operation, place=0)
        yield replace(operation, backward=False)
    if isinstance(operation, UnshardFirst):
        yield ForwardBackward(operation.batch)
        yield UnshardFirst(Batch(operation.batch.seed, (2,)))
        yield replace(operation, units=("",))
        yield replace(operation, reshard=False)
    if isinstance(operation, ReplaceParameters):
        yield EditFullParameters(operation.patterns, operation.factor)
        for name in operation.patterns if len(operation.patterns) > 1 else ():
            yield replace(operation, patterns=(name,))
    if isinstance(operation, AssignData):
        yield AssignData(("*",), operation.factor, Batch(operation.batch.seed, (2,)))
        yield replace(operation, patterns=("*",))


def trees(case: Case) -> Iterator[Case]:
    """Yields the case with one part of its module tree left out or simplified."""
    tree = case.model.tree
    if tree is None:
        return
    for smaller in _smaller_trees(tree):
        yield replace(case, model=replace(case.model, tree=smaller))


def _smaller_trees(tree: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for path in _paths(tree["nodes"]):
        yield _edited(tree, path, lambda nodes, i: nodes[:i] + nodes[i + 1 :])
    if tree.get("output", "tensor") != "tensor":
        yield {**tree, "output": "tensor"}
    for path in _paths(tree["nodes"]):
        yield from _simpler_nodes(tree, path)
    widths = {tree["width"], *(n["out"] for n in _all(tree["nodes"]) if "out" in n)}
    if widths != {2}:
        yield _with_width(tree, 2)
        yield _with_width(tree, 3)
        yield {**tree, "width": 2}


def _simpler_nodes(tree: dict[str, Any], path: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    node = _at(tree["nodes"], path)
    if node["kind"] == "group":
        yield _edited(tree, path, lambda nodes, i: nodes[:i] + _renamed(nodes, i) + nodes[i + 1 :])
    elif node["kind"] != "linear":
        yield _edited(
            tree, path, lambda nodes, i: [*nodes[:i], {"kind": "linear", "name": nodes[i]["name"]}, *nodes[i + 1 :]]
        )
    for name, default in SCHEMA[node["kind"]].items():
        if name in node and name != "nodes" and node[name] != default:
            without = {key: value for key, value in node.items() if key != name}
            yield _edited(tree, path, lambda nodes, i, new=without: [*nodes[:i], new, *nodes[i + 1 :]])


def _renamed(nodes: list[Node], place: int) -> list[Node]:
    """The nodes of a group under names that are free outside it."""
    taken = {node["name"] for index, node in enumerate(nodes) if index != place}
    inner = []
    for node in get(nodes[place], "nodes"):
        name = node["name"]
        while name in taken:
            name += "x"
        taken.add(name)
        inner.append({**node, "name": name})
    return inner


def _with_width(tree: dict[str, Any], width: int) -> dict[str, Any]:
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
    for place, node in enumerate(nodes):
        yield (*prefix, place)
        yield from _paths(node.get("nodes", []), (*prefix, place))


def _at(nodes: list[Node], path: tuple[int, ...]) -> Node:
    node = nodes[path[0]]
    return node if len(path) == 1 else _at(node["nodes"], path[1:])


def _edited(tree: dict[str, Any], path: tuple[int, ...], edit: Any) -> dict[str, Any]:
    def inside(nodes: list[Node], rest: tuple[int, ...]) -> list[Node]:
        if len(rest) == 1:
            edited: list[Node] = edit(nodes, rest[0])
            return edited
        place = rest[0]
        return [*nodes[:place], {**nodes[place], "nodes": inside(nodes[place]["nodes"], rest[1:])}, *nodes[place + 1 :]]

    return {**tree, "nodes": inside(tree["nodes"], path)}
