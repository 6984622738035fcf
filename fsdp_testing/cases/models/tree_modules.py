"""Groups of a drawn model: they make layers and call them in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fsdp_testing.cases.models import tree_layers
from fsdp_testing.cases.models.model import tensors_in
from fsdp_testing.cases.models.tree_schema import SCHEMA, Node, get

Use = tuple[bool, ...]


class Nodes(list[Node]):
    """A module's nodes: shared by its copies, since they never change."""

    def __deepcopy__(self, _memo: dict[int, Any]) -> Nodes:
        return self


LEAVES: Mapping[str, type[nn.Module]] = {
    "linear": tree_layers.TreeLinear,
    "scale": tree_layers.TreeScale,
    "norm": tree_layers.TreeNorm,
    "conv": tree_layers.TreeConv,
    "embed": tree_layers.TreeEmbed,
    "offset": tree_layers.TreeOffset,
    "buffer": tree_layers.TreeBuffer,
    "dropout": tree_layers.TreeDropout,
}


def options_of(node: Node) -> dict[str, Any]:
    """Return the options of a node's layer, without flags that have their defaults."""
    fields = [name for name in SCHEMA[node["kind"]] if name not in ("tie", "frozen", "dtype")]
    options = {name: get(node, name) for name in fields if name in node or not isinstance(get(node, name), bool)}
    return options | ({"dtype": getattr(torch, node["dtype"])} if node.get("dtype") else {})


class TreeGroup(nn.Module):
    """Calls its nodes in order; its caller reads from its node how to call the group."""

    kept: torch.Tensor | None

    def __init__(self, node: Node, width: int) -> None:
        super().__init__()
        self._nodes = Nodes(get(node, "nodes"))
        self._returns, self._view = get(node, "returns"), get(node, "view")
        self._keeps = get(node, "keeps")
        self.kept = None
        self.out = fill_with(self, self._nodes, width)

    def forward(self, x: torch.Tensor, *, ids: torch.Tensor, use: Use = ()) -> Any:
        x = run(self, self._nodes, x, ids, use)
        if self._keeps:
            self.kept = x
            return x * 0.5
        if self._view:
            return torch.cat([x, x], dim=-1)[:, : x.shape[-1]]
        if self._returns == "tensor":
            return x
        return tree_layers.pack(self._returns, x, torch.sin(x))


class Tree(nn.Module):
    """The root: takes rows of numbers, one token per row, and which branches run."""

    def __init__(self, tree: Mapping[str, Any]) -> None:
        super().__init__()
        self._nodes = Nodes(tree["nodes"])
        self._output = tree.get("output", "tensor")
        self.out = fill_with(self, self._nodes, tree["width"])

    def forward(self, x: torch.Tensor, *, ids: torch.Tensor, use: Use = ()) -> Any:
        x = run(self, self._nodes, x, ids, use)
        return tree_layers.pack(self._output, x, torch.cos(x))


def fill_with(parent: nn.Module, nodes: list[Node], width: int) -> int:
    """Make the modules of `nodes` as attributes of `parent` and return the width that comes out."""
    outs: dict[str, int] = {}
    for node in nodes:
        name, kind = node["name"], node["kind"]
        if kind == "again":
            of = get(node, "of")
            parent.add_module(name, parent.get_submodule(of))
            width = outs[of]
        elif kind == "group":
            group = TreeGroup(node, width)
            parent.add_module(name, group)
            width = width if get(node, "dropped") else group.out
        else:
            parent.add_module(name, LEAVES[kind](width, **options_of(node)))
            width = get(node, "out") if kind == "linear" else width
        outs[name] = width
    return width


def run(parent: nn.Module, nodes: list[Node], x: torch.Tensor, ids: torch.Tensor, use: Use) -> torch.Tensor:
    """Call the modules of `nodes` in order."""
    known = {node["name"]: node for node in nodes}
    for node in nodes:
        # Looked up at each call: an implementation may have replaced the module.
        module = getattr(parent, node["name"])
        if node["kind"] == "again":
            node = known[get(node, "of")]
        if node["kind"] == "group":
            x = _call_group(module, node, x, ids, use)
        elif node["kind"] == "offset":
            x = x + module()
        elif node["kind"] == "embed":
            x = module(x, ids=ids)
        else:
            x = module(x)
    return x


def _call_group(module: nn.Module, node: Node, x: torch.Tensor, ids: torch.Tensor, use: Use) -> torch.Tensor:
    branch = get(node, "branch")
    if 0 <= branch < len(use) and not use[branch]:
        return x
    if get(node, "dropped"):
        module(x, ids=ids, use=use)
        return x
    before = x
    for _ in range(get(node, "calls")):
        x = _taken(module, node, module(x, ids=ids, use=use), x)
    return x + before if get(node, "residual") else x


def _taken(module: nn.Module, node: Node, result: Any, before: torch.Tensor) -> torch.Tensor:
    """Return the value that the caller computes from a group's output."""
    if get(node, "keeps"):
        return _take_kept(module)
    if get(node, "view"):
        result += 0.5
    tensors = tensors_in(result)
    return tensors[0] if len(tensors) == 1 else tensors[0] + 0.5 * tensors[1]


def _take_kept(module: nn.Module) -> torch.Tensor:
    """Return the intermediate that a group kept, wherever a wrapper has put the group."""
    for inner in module.modules():
        if isinstance(inner, TreeGroup) and inner.kept is not None:
            kept, inner.kept = inner.kept, None  # else the graph of this step would live until the next
            return kept
    raise RuntimeError("the group kept nothing")
