"""Writes a drawn module tree as the Python source of ordinary modules, for scripts that use torch alone.

The layers are those of `zoo.tree_layers`; groups are spelled out one by one, so that a reader sees a model and not an
interpreter of one.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from fsdp_testing.cases.models import tree_layers
from fsdp_testing.cases.models.tree import LEAVES, options_of
from fsdp_testing.cases.models.tree_schema import Node, get, parameters, walk

CONTAINERS = {
    "tuple": ("({one}, {other})", "{made}[0]", "{made}[1]"),
    "list": ("[{one}, None, {other}]", "{made}[0]", "{made}[2]"),
    "dict": ('{{"one": {one}, "other": {other}}}', '{made}["one"]', '{made}["other"]'),
    "nested": (
        '{{"both": [({one},), {{"other": {other}}}]}}',
        '{made}["both"][0][0]',
        '{made}["both"][1]["other"]',
    ),
    "named_tuple": ("Named({one}, {other})", "{made}.mean", "{made}.spread"),
    "dataclass": ('Record({one}, ({other}, "text"))', "{made}.mean", "{made}.parts[0]"),
    "opaque": ("Opaque({one}, {other})", "{made}.mean", "{made}.spread"),
}

_OUTPUTS = {"named_tuple": tree_layers.Named, "dataclass": tree_layers.Record, "opaque": tree_layers.Opaque}
"""Classes of the containers that a tree returns, if Python has none."""


def model_source(tree: Mapping[str, Any]) -> str:
    """Return the source of a class `Model` for a legal tree, with every class that it needs."""
    writer = _Writer()
    writer.group(
        "Model", tree["nodes"], tree["width"], {"returns": tree.get("output", "tensor"), "kind": "group"}, "cos"
    )
    classes: list[type] = [_OUTPUTS[name] for name in sorted(writer.containers) if name in _OUTPUTS]
    classes += [LEAVES[kind] for kind in sorted(writer.kinds)]
    parts = [inspect.getsource(one).strip() for one in classes]
    return "\n\n\n".join([*parts, *writer.classes, _build_source(tree)])


def _build_source(tree: Mapping[str, Any]) -> str:
    lines = ["def build():", "    model = Model()", *(f"    {line}" for line in shared_again(tree))]
    lines += [
        "    generator = torch.Generator().manual_seed(0)",
        "    with torch.no_grad():",
        "        for parameter in model.parameters():",
        "            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))",
    ]
    lines += [f"    model.{spec.fqn}.requires_grad_(False)" for spec in parameters(tree) if spec.frozen]
    return "\n".join([*lines, "    return model.train()"])


def shared_again(tree: Mapping[str, Any]) -> list[str]:
    """Return the lines that tie shared parameters."""
    lines: list[str] = []
    first: dict[tuple[Any, ...], str] = {}
    for spec in parameters(tree):
        if spec.tie and spec.tie in first:
            lines.append(f"model.{spec.module}.{spec.name} = model.{first[spec.tie]}  # one parameter")
        elif spec.tie:
            first[spec.tie] = spec.fqn
    return lines


class _Writer:
    """Writes one class for each group of a tree."""

    def __init__(self) -> None:
        self.classes: list[str] = []
        self.kinds: set[str] = set()
        self.containers: set[str] = set()
        self._count = 0

    def group(self, name: str, nodes: list[Node], width: int, own: Mapping[str, Any], second: str) -> None:
        places = {place.node["name"]: place for place in walk({"nodes": nodes, "width": width})}
        known = {node["name"]: node for node in nodes}
        made, calls = [], []
        for node in nodes:
            source = known[get(node, "of")] if node["kind"] == "again" else node
            if node["kind"] == "again":
                made.append(f"self.{node['name']} = self.{source['name']}  # registered twice")
            else:
                made.append(f"self.{node['name']} = {self._construct(node, places[node['name']].width)}")
            calls += list(self._call(node["name"], source))
        body = ["    def __init__(self):", "        super().__init__()", *(f"        {line}" for line in made)]
        body += ["", "    def forward(self, x, ids, use=()):", *(f"        {line}" for line in calls)]
        body += [f"        {line}" for line in self._return(own, second)]
        self.classes.append("\n".join([f"class {name}(nn.Module):", *body]))

    def _construct(self, node: Node, width: int) -> str:
        kind = node["kind"]
        if kind == "group":
            self._count += 1
            name = f"Group{self._count}"
            self.group(name, get(node, "nodes"), width, node, "sin")
            return f"{name}()"
        self.kinds.add(kind)
        options = "".join(f", {name}={value!r}" for name, value in options_of(node).items())
        return f"{LEAVES[kind].__name__}({width}{options})"

    def _call(self, name: str, node: Node) -> Iterator[str]:
        kind = node["kind"]
        if kind == "offset":
            yield f"x = x + self.{name}()"
        elif kind == "embed":
            yield f"x = self.{name}(x, ids=ids)"
        elif kind != "group":
            yield f"x = self.{name}(x)"
        else:
            branch = get(node, "branch")
            indent = ""
            if branch >= 0:
                yield f"if len(use) <= {branch} or use[{branch}]:"
                indent = "    "
            for line in self._call_group(name, node):
                yield indent + line

    def _call_group(self, name: str, node: Node) -> Iterator[str]:
        call = f"self.{name}(x, ids=ids, use=use)"
        if get(node, "dropped"):
            yield f"{call}  # its output is not used"
            return
        if get(node, "residual"):
            yield "before = x"
        for _ in range(get(node, "calls")):
            yield f"y = {call}"
            if get(node, "keeps"):
                yield f"x, self.{name}.kept = self.{name}.kept, None"
            elif get(node, "view"):
                yield "y += 0.5"
                yield "x = y"
            elif get(node, "returns") != "tensor":
                _, one, other = CONTAINERS[get(node, "returns")]
                yield f"x = {one.format(made='y')} + 0.5 * {other.format(made='y')}"
            else:
                yield "x = y"
        if get(node, "residual"):
            yield "x = x + before"

    def _return(self, own: Mapping[str, Any], second: str) -> list[str]:
        returns = own.get("returns", "tensor")
        if own.get("keeps"):
            return ["self.kept = x", "return x * 0.5"]
        if own.get("view"):
            return ["return torch.cat([x, x], dim=-1)[:, : x.shape[-1]]"]
        if returns == "tensor":
            return ["return x"]
        self.containers.add(returns)
        return [f"return {CONTAINERS[returns][0].format(one='x', other=f'torch.{second}(x)')}"]
