"""Which module trees are legal, and the legal tree nearest to an illegal one.

A drawn model is plain JSON data: `{"width": 5, "output": "tensor", "nodes": [...]}`. The nodes are called one after the
other on a running tensor of shape `[rows, width]`; a group is a module of its own with nodes inside. Only output widths
are written down; input widths follow from earlier nodes. So any node, group or field may be deleted: `legal_tree`, the one
function that decides, drops parts that no longer make sense (a residual around a change of width, an alias of a deleted
node).

Names of nodes are attribute names, so that the FQN of a module is the path of names to its node.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fsdp_testing.cases.records import Case, check_case
from fsdp_testing.errors import InvalidRecord

Node = dict[str, Any]

CONTAINERS = ("tensor", "tuple", "list", "dict", "nested", "named_tuple", "dataclass", "opaque")
DTYPES = ("", "float64", "float32", "float16", "bfloat16")

SCHEMA: Mapping[str, Mapping[str, Any]] = {
    "linear": {"out": 4, "bias": True, "strided": False, "tie": "", "frozen": "", "dtype": "", "act": True},
    "scale": {"shape": "vector", "frozen": "", "dtype": ""},
    "norm": {"frozen": ""},
    "conv": {"channels": 2, "kernel": 3, "frozen": ""},
    "embed": {"rows": 7, "tie": "", "frozen": ""},
    "offset": {"frozen": ""},
    "buffer": {"style": "constant", "persistent": True, "buffer": "offset", "twin": False},
    "dropout": {},
    "again": {"of": ""},
    "group": {
        "nodes": [],
        "calls": 1,
        "branch": -1,
        "residual": False,
        "returns": "tensor",
        "view": False,
        "keeps": False,
        "dropped": False,
    },
}
"""Kind of node -> its fields with their defaults; a field that is absent has its default."""

CHOICES: Mapping[str, tuple[Any, ...]] = {
    "shape": ("vector", "scalar", "one", "empty"),
    "style": ("constant", "running", "counter"),
    "returns": CONTAINERS,
    "frozen": ("", "weight", "bias", "all"),
    "dtype": DTYPES,
    "calls": (1, 2, 3),
    "kernel": (1, 3),
}
_LARGEST = 4096


def get(node: Mapping[str, Any], name: str) -> Any:
    """Return a field of a node, or its default."""
    return node.get(name, SCHEMA[node["kind"]][name])


def check_tree(tree: Any, where: str = "case.model.tree") -> None:
    """Check that `tree` is data of the right form; `legal_tree` decides whether each part makes sense.

    Raises:
        InvalidRecord: Every offender is listed.
    """
    if not isinstance(tree, dict) or not isinstance(tree.get("nodes"), list):
        raise InvalidRecord(f"{where}: expected an object with a list of nodes, got {tree!r:.80}. Fix the document.")
    problems = list(_problems_of_root(tree)) + list(_problems(tree["nodes"], "nodes"))
    if problems:
        raise InvalidRecord(f"{where}: {'; '.join(problems)}. Fix the document.")


def check_case_with_tree(case: Case, where: str) -> None:
    """Check rules for a case as a whole, including its tree, which is plain data until a model is made from it.

    Raises:
        InvalidRecord: Every offender is listed.
    """
    check_case(case, where)
    if case.model.tree is not None:
        check_tree(case.model.tree, f"{where}.model.tree")


def _problems_of_root(tree: Mapping[str, Any]) -> Iterator[str]:
    if type(tree.get("width")) is not int or not 1 <= tree["width"] <= _LARGEST:
        yield f"width: expected an integer from 1 to {_LARGEST}, got {tree.get('width')!r}"
    if tree.get("output", "tensor") not in CONTAINERS:
        yield f"output: expected one of {', '.join(CONTAINERS)}, got {tree['output']!r}"
    unknown = sorted(set(tree) - {"width", "output", "nodes"})
    if unknown:
        yield f"expected the fields width, output and nodes, got also {unknown}"


def _problems(nodes: Any, where: str) -> Iterator[str]:
    if not isinstance(nodes, list):
        yield f"{where}: expected a list, got {nodes!r:.40}"
        return
    names: set[Any] = set()
    for index, node in enumerate(nodes):
        here = f"{where}[{index}]"
        kind = node.get("kind") if isinstance(node, dict) else None
        if not isinstance(kind, str) or kind not in SCHEMA:
            yield f"{here}.kind: expected one of {', '.join(SCHEMA)}, got {kind!r}"
            continue
        yield from _problems_of_fields(node, here)
        name = node.get("name")
        if not isinstance(name, str) or not name.isidentifier() or name.startswith("_") or name in names:
            yield f"{here}.name: expected a valid, unique identifier, got {name!r}"
        names.add(str(name))
        if kind == "group":
            yield from _problems(node.get("nodes", []), f"{here}.nodes")


def _problems_of_fields(node: Node, where: str) -> Iterator[str]:
    schema = SCHEMA[node["kind"]]
    unknown = sorted(set(node) - set(schema) - {"kind", "name"})
    if unknown:
        yield f"{where}: expected the fields {', '.join(schema)}, got {unknown} besides"
    for name, default in schema.items():
        value = node.get(name, default)
        if type(value) is not type(default):
            yield f"{where}.{name}: expected a {type(default).__name__}, got {value!r:.40}"
        elif name in CHOICES and value not in CHOICES[name]:
            yield f"{where}.{name}: expected one of {CHOICES[name]}, got {value!r}"
        elif name in ("out", "rows", "channels") and not 1 <= value <= _LARGEST:
            yield f"{where}.{name}: expected 1 to {_LARGEST}, got {value}"
        elif name == "buffer" and not value.isidentifier():
            yield f"{where}.{name}: expected an identifier, got {value!r}"


# ----------------------------------------------------------------------------------------------- normal form


def legal_tree(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree without parts that have no meaning where they are; a legal tree is returned equal.

    Every forward of the result uses at least one trainable parameter with elements: an optimizer without parameters is an
    error, and so is a rank with nothing to reduce among others that reduce.
    """
    width = tree["width"]
    nodes, out = _legal_nodes(tree["nodes"], width, set())
    if not _always_trains(walk({"width": width, "nodes": nodes})):
        taken = {node["name"] for node in nodes}
        name = next(name for name in ("last", *(f"last{i}" for i in range(len(taken) + 1))) if name not in taken)
        nodes.append(_without_defaults({"kind": "linear", "name": name, "out": out}))
    legal: dict[str, Any] = {"width": width, "nodes": nodes}
    if tree.get("output", "tensor") != "tensor":
        legal["output"] = tree["output"]
    return legal


def _always_trains(places: list[Walk]) -> bool:
    for place in places:
        if place.node["kind"] == "group":
            optional = get(place.node, "branch") >= 0 or get(place.node, "dropped")
            if not optional and _always_trains(place.inner):
                return True
        elif any(spec.numel and not spec.frozen for spec in _parameters_of(place)):
            return True
    return False


def _legal_nodes(nodes: list[Node], width: int, tied: set[tuple[Any, ...]]) -> tuple[list[Node], int]:
    kept: list[Node] = []
    seen: dict[str, tuple[int, int]] = {}
    for node in nodes:
        after = width
        if node["kind"] == "again":
            known = seen.get(get(node, "of"))
            if known is None or known[0] != width:
                continue
            after = known[1]
        elif node["kind"] == "group":
            node, after = _legal_group(node, width, tied)
        elif node["kind"] == "linear":
            after = get(node, "out")
        if node["kind"] not in ("again", "buffer", "dropout"):
            seen[node["name"]] = (width, after)
        kept.append(_without_defaults(node))
        width = after
    return kept, width


def _legal_group(node: Node, width: int, tied: set[tuple[Any, ...]]) -> tuple[Node, int]:
    inner, after = _legal_nodes(get(node, "nodes"), width, tied)
    group = {**node, "nodes": inner}
    if after != width:
        group |= {"calls": 1, "branch": -1, "residual": False}
    if get(group, "dropped"):
        # Its output is unused, so nothing about the output matters.
        group |= {"residual": False, "returns": "tensor", "view": False, "keeps": False, "calls": 1}
        after = width
    if get(group, "calls") > 1:
        group |= {"keeps": False}
    if get(group, "keeps") or get(group, "returns") != "tensor":
        group |= {"view": False}
    return group, after


def _without_defaults(node: Node) -> Node:
    schema = SCHEMA[node["kind"]]
    return {key: value for key, value in node.items() if key in ("kind", "name") or value != schema[key]}


# ----------------------------------------------------------------------------------------------- what a tree holds


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One parameter of a tree.

    Attributes:
        module: FQN of the module that holds it.
        name: Its name there.
        shape: Its shape.
        frozen: It starts with `requires_grad=False`.
        dtype: Dtype of its own, or empty.
        tie: Key of its tie; equal for parameters that are the same tensor.
        strided: It is stored transposed.
    """

    module: str
    name: str
    shape: tuple[int, ...]
    frozen: bool = False
    dtype: str = ""
    tie: tuple[Any, ...] = ()
    strided: bool = False

    @property
    def fqn(self) -> str:
        return f"{self.module}.{self.name}"

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(slots=True)
class Walk:
    """A node in its place: its FQN and its input width."""

    node: Node
    fqn: str
    width: int
    out: int = 0
    inner: list[Walk] = field(default_factory=list)


def walk(tree: Mapping[str, Any]) -> list[Walk]:
    """Return the nodes of a legal tree, each with its FQN and widths; aliases are left out."""
    return _walk(tree["nodes"], "", tree["width"])[0]


def _walk(nodes: list[Node], prefix: str, width: int) -> tuple[list[Walk], int]:
    found: list[Walk] = []
    outs: dict[str, int] = {}
    for node in nodes:
        if node["kind"] == "again":
            width = outs[get(node, "of")]
            continue
        place = Walk(node, prefix + node["name"], width)
        if node["kind"] == "group":
            place.inner, out = _walk(get(node, "nodes"), f"{place.fqn}.", width)
            width = width if get(node, "dropped") else out
        elif node["kind"] == "linear":
            width = get(node, "out")
        place.out = outs[node["name"]] = width
        found.append(place)
    return found, width


def every(places: list[Walk]) -> Iterator[Walk]:
    """Yield places and what is inside them, outermost first."""
    for place in places:
        yield place
        yield from every(place.inner)


def parameters(tree: Mapping[str, Any]) -> list[ParameterSpec]:
    """Return every parameter of a legal tree, once for each of its names."""
    return [spec for place in every(walk(tree)) for spec in _parameters_of(place)]


def _parameters_of(place: Walk) -> Iterator[ParameterSpec]:
    node, width, kind = place.node, place.width, place.node["kind"]
    shapes: dict[str, tuple[int, ...]] = {}
    if kind == "linear":
        out = get(node, "out")
        shapes = {"weight": (out, width), "bias": (out,)} if get(node, "bias") else {"weight": (out, width)}
    elif kind == "scale":
        sizes = {"vector": (width,), "scalar": (), "one": (1,), "empty": (0,)}
        shapes = {"weight": sizes[get(node, "shape")]}
    elif kind == "norm":
        shapes = {"weight": (width,), "bias": (width,)}
    elif kind == "conv":
        shapes = {"weight": (get(node, "channels"), 1, get(node, "kernel")), "bias": (get(node, "channels"),)}
    elif kind == "embed":
        shapes = {"weight": (get(node, "rows"), width)}
    elif kind == "offset":
        shapes = {"weight": (width,)}
    dtype, label = node.get("dtype", ""), node.get("tie", "")
    for name, shape in shapes.items():
        frozen = node.get("frozen", "") in (name, "all")
        strided = name == "weight" and node.get("strided", False)
        tie = (kind, label, shape, dtype, strided, frozen) if label and name == "weight" else ()
        yield ParameterSpec(place.fqn, name, shape, frozen, dtype, tie, strided)
