"""Turns a drawn module tree, plain data, into a model of the zoo: its groups make layers and call them in order."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fsdp_testing.cases.models import tree_layers
from fsdp_testing.cases.models.model import Inputs, ZooModel, features, tensors_in, tokens
from fsdp_testing.cases.models.tree_schema import (
    SCHEMA,
    Node,
    ParameterSpec,
    check_tree,
    every,
    get,
    legal_tree,
    parameters,
    walk,
)

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


__all__ = ["check_tree", "legal_tree", "needs_of", "tree_model", "unit_names"]

VOCABULARY = 64
"""Token ids are drawn below this number; each embedding wraps them around its own rows."""


_LATEST: dict[int, tuple[Any, ZooModel]] = {}


def tree_model(tree: Any) -> ZooModel:
    """Return the zoo's entry for a drawn tree.

    Raises:
        InvalidRecord: The data is no tree.
    """
    # Called at every forward of a case with the same object: cached by identity, without reading it.
    known = _LATEST.get(id(tree))
    if known is not None and known[0] is tree:
        return known[1]
    model = _tree_model(json.dumps(tree, sort_keys=True))
    _LATEST.clear()
    _LATEST[id(tree)] = (tree, model)
    return model


@functools.lru_cache(maxsize=64)
def _tree_model(text: str) -> ZooModel:
    tree = json.loads(text)
    check_tree(tree)
    tree = legal_tree(tree)
    specs = parameters(tree)
    # Without `needs`: a tree's needs depend on the wrapped units, see `needs_of`.
    return ZooModel(
        name="tree",
        summary="A module tree drawn by the fuzzer.",
        construct=functools.partial(_construct, tree, specs),
        make_input=functools.partial(_make_input, tree["width"]),
        units=unit_names(tree),
        finish=functools.partial(_finish, specs),
        constructed=torch.float64,
    )


def _construct(tree: Mapping[str, Any], specs: Sequence[ParameterSpec]) -> nn.Module:
    # In float64 and cast afterwards by `ZooModel.build`; dtypes of single nodes are set by `_finish`.
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        module = Tree(tree)
    finally:
        torch.set_default_dtype(before)
    first: dict[tuple[Any, ...], nn.Parameter] = {}
    for spec in specs:
        holder = module.get_submodule(spec.module)
        parameter = holder.get_parameter(spec.name)
        if spec.frozen:
            parameter.requires_grad_(False)
        if spec.tie:
            setattr(holder, spec.name, first.setdefault(spec.tie, parameter))
    return module


def _finish(specs: Sequence[ParameterSpec], module: nn.Module, dtype: torch.dtype) -> None:
    for spec in specs:
        if spec.dtype and getattr(torch, spec.dtype) != dtype:
            parameter = module.get_submodule(spec.module).get_parameter(spec.name)
            parameter.data = parameter.data.to(getattr(torch, spec.dtype))


def _make_input(width: int, seed: int, rank: int, step: int, batch: int, dtype: torch.dtype, **options: Any) -> Inputs:
    x = features(seed, rank, step, (batch, width), dtype)
    ids = tokens(seed, rank, step, (batch,), VOCABULARY)
    return Inputs((x,), {"ids": ids, "use": tuple(options.get("use", ()))})


def unit_names(tree: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the FQN of every module of a legal tree that may be a unit, outermost first."""
    return tuple(place.fqn for place in every(walk(tree)) if place.node["kind"] not in ("buffer", "dropout"))


def unit_of(module: str, units: tuple[str, ...]) -> str:
    """Return the innermost unit that holds `module`; the root is the empty string."""
    return max((unit for unit in units if f"{module}.".startswith(f"{unit}.")), key=len, default="")


_NEEDS_OF_GROUP = {
    "calls": "reused_modules",
    "dropped": "unused_parameters",
    "view": "inplace_on_output",
    "keeps": "loss_bypasses_output",
    "returns": "container_outputs",
}
"""Capability that a group needs where a field has not its default."""


def needs_of(tree: Mapping[str, Any], units: tuple[str, ...]) -> frozenset[str]:
    """Return the capabilities that a legal tree needs when `units` are wrapped."""
    tags = {"uneven_parameters"}
    returned = [tree.get("output", "tensor")]
    for place in every(walk(tree)):
        node, kind = place.node, place.node["kind"]
        tags |= {"buffers"} if kind == "buffer" else set()
        if kind == "group":
            tags |= {tag for name, tag in _NEEDS_OF_GROUP.items() if get(node, name) != SCHEMA[kind][name]}
            returned.append(get(node, "returns"))
    tags |= {"container_outputs"} if set(returned) != {"tensor"} else set()
    tags |= {"opaque_outputs"} if "opaque" in returned else set()
    tags |= {"reused_modules", "shared_parameters"} if has_alias(tree["nodes"]) else set()
    return frozenset(tags | _needs_of_parameters(parameters(tree), units))


def _needs_of_parameters(specs: Sequence[ParameterSpec], units: tuple[str, ...]) -> set[str]:
    tags: set[str] = set()
    tags |= {"frozen_parameters"} if any(spec.frozen for spec in specs) else set()
    tags |= {"zero_dim_parameters"} if any(spec.shape == () for spec in specs) else set()
    tags |= {"empty_parameters"} if any(not spec.numel for spec in specs) else set()
    tags |= {"strided_parameters"} if any(spec.strided for spec in specs) else set()
    places = [(unit_of(spec.module, units), spec) for spec in specs]
    tied: dict[tuple[Any, ...], list[ParameterSpec]] = {}
    for spec in specs:
        if spec.tie:
            tied.setdefault(spec.tie, []).append(spec)
    for several in tied.values():
        tags |= {"shared_parameters"} if len({spec.module for spec in several}) > 1 else set()
        if len({unit_of(spec.module, units) for spec in several}) > 1:
            tags.add("shared_across_units")
            # The implementation decides whether one of its units owns it, or the lowest unit around them.
            around = [u for u in units if all(f"{spec.module}.".startswith(f"{u}.") for spec in several)]
            places.append((max(around, key=len, default=""), several[0]))
    dtypes: dict[str, set[str]] = {}
    flags: dict[str, set[bool]] = {}
    for unit, spec in places:
        dtypes.setdefault(unit, set()).add(spec.dtype)
        flags.setdefault(unit, set()).add(spec.frozen)
    tags |= {"mixed_dtype_units"} if any(len(found) > 1 for found in dtypes.values()) else set()
    tags |= {"frozen_mixed_unit"} if any(len(found) > 1 for found in flags.values()) else set()
    return tags


def has_alias(nodes: list[dict[str, Any]]) -> bool:
    """Return whether some module of a tree is registered twice."""
    return any(node["kind"] == "again" or has_alias(node.get("nodes", [])) for node in nodes)
