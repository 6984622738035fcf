"""How does a drawn module tree, plain data, become a model of the zoo?"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fsdp_testing.zoo.model import Inputs, ZooModel, features, tokens
from fsdp_testing.zoo.tree_modules import Tree
from fsdp_testing.zoo.tree_schema import (
    ParameterSpec,
    check_tree,
    every,
    get,
    legal_tree,
    parameters,
    walk,
)

__all__ = ["check_tree", "legal_tree", "needs_of", "tree_model", "unit_names"]

VOCABULARY = 64
"""Token ids are drawn below this number; each embedding wraps them around its own rows."""


_LATEST: dict[int, tuple[Any, ZooModel]] = {}


def tree_model(tree: Any) -> ZooModel:
    """Return the zoo's entry for a drawn tree.

    Raises:
        InvalidRecord: The data is no tree.
    """
    # Asked at every forward of a case with one and the same object: kept by identity, which needs no reading.
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
    # Without `needs`: what a tree needs depends on the units that are wrapped, and `needs_of` tells it.
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
    holding = [unit for unit in units if module == unit or module.startswith(f"{unit}.")]
    return max(holding, key=len, default="")


def needs_of(tree: Mapping[str, Any], units: tuple[str, ...]) -> frozenset[str]:
    """Return the capabilities that a legal tree needs when `units` are wrapped."""
    tags: set[str] = set()
    for place in every(walk(tree)):
        tags |= _needs_of_node(place.node)
    specs = parameters(tree)
    tags |= _needs_of_ties(tree, specs, units)
    dtypes: dict[str, set[str]] = {}
    flags: dict[str, set[bool]] = {}
    for spec in specs:
        unit = unit_of(spec.module, units)
        dtypes.setdefault(unit, set()).add(spec.dtype)
        flags.setdefault(unit, set()).add(spec.frozen)
        if spec.frozen:
            tags.add("frozen_parameters")
        if spec.shape == ():
            tags.add("zero_dim_parameters")
        elif not spec.numel:
            tags.add("empty_parameters")
        if spec.strided:
            tags.add("strided_parameters")
    for unit, spec in _shared_above(specs, units):
        # Whose parameter it is then, one of its units' or that of the unit around them, is the implementation's affair.
        dtypes.setdefault(unit, set()).add(spec.dtype)
        flags.setdefault(unit, set()).add(spec.frozen)
    if any(len(held) > 1 for held in dtypes.values()):
        tags.add("mixed_dtype_units")
    if any(len(held) > 1 for held in flags.values()):
        tags.add("frozen_mixed_unit")
    tags |= {"container_outputs"} if tree.get("output", "tensor") != "tensor" else set()
    tags |= {"opaque_outputs"} if tree.get("output") == "opaque" else set()
    return frozenset(tags | {"uneven_parameters"})


def _needs_of_node(node: Mapping[str, Any]) -> set[str]:
    if node["kind"] == "buffer":
        return {"buffers"}
    if node["kind"] != "group":
        return set()
    tags: set[str] = set()
    tags |= {"reused_modules"} if get(node, "calls") > 1 else set()
    tags |= {"unused_parameters"} if get(node, "dropped") else set()
    tags |= {"inplace_on_output"} if get(node, "view") else set()
    tags |= {"loss_bypasses_output"} if get(node, "keeps") else set()
    tags |= {"container_outputs"} if get(node, "returns") != "tensor" else set()
    tags |= {"opaque_outputs"} if get(node, "returns") == "opaque" else set()
    return tags


def _needs_of_ties(tree: Mapping[str, Any], specs: list[ParameterSpec], units: tuple[str, ...]) -> set[str]:
    tags: set[str] = set()
    if has_alias(tree["nodes"]):
        tags |= {"reused_modules", "shared_parameters"}
    groups: dict[tuple[Any, ...], set[str]] = {}
    for spec in specs:
        if spec.tie:
            groups.setdefault(spec.tie, set()).add(spec.module)
    for modules in groups.values():
        if len(modules) > 1:
            tags |= {"shared_parameters"}
            tags |= {"shared_across_units"} if len({unit_of(module, units) for module in modules}) > 1 else set()
    return tags


def _shared_above(specs: list[ParameterSpec], units: tuple[str, ...]) -> Iterator[tuple[str, ParameterSpec]]:
    """Yield each parameter that several units share, with the lowest unit around all of its places."""
    groups: dict[tuple[Any, ...], list[ParameterSpec]] = {}
    for spec in specs:
        if spec.tie:
            groups.setdefault(spec.tie, []).append(spec)
    for tied in groups.values():
        if len({unit_of(spec.module, units) for spec in tied}) > 1:
            around = [u for u in units if all(f"{spec.module}.".startswith(f"{u}.") for spec in tied)]
            yield max(around, key=len, default=""), tied[0]


def has_alias(nodes: list[dict[str, Any]]) -> bool:
    """Return whether some module of a tree is registered twice."""
    return any(node["kind"] == "again" or has_alias(node.get("nodes", [])) for node in nodes)
