"""Layouts over the tensor-parallel axis: the legal layouts of a drawn tree's modules, and how they are drawn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fsdp_testing.cases.drawing.choices import Choices
from fsdp_testing.cases.models.tree_schema import Node, ParameterSpec, every, get, parameters, walk

Layouts = tuple[tuple[str, str], ...]

OF_KIND: Mapping[str, tuple[str, ...]] = {
    "linear": ("colwise", "rowwise", "colwise_cut", "rowwise_cut", "replicated"),
    "embed": ("colwise", "rowwise", "replicated"),
    "norm": ("sequence", "replicated"),
    "scale": ("sequence", "replicated"),
    "conv": (),  # where a user freezes the weight, backward of torch's own convolution over DTensors raises
    "offset": ("replicated",),
}
"""Layouts that torch supports for each kind of node; no layout counts too."""
_PALETTE = ("colwise", "rowwise", "colwise_cut", "sequence", "replicated")


def draw_layouts(choices: Choices, tree: Mapping[str, Any], ranks: int) -> Layouts:
    """Draw a layout for about two of three modules, from about half of the layouts; the other modules stay unchanged."""
    mask = choices.subset(len(_PALETTE), sparse=False)
    wanted = {name for place, name in enumerate(_PALETTE) if mask >> place & 1}
    layouts: dict[str, str] = {}
    for first, second in _pairs(tree["nodes"], "", ranks):
        if "colwise_cut" in wanted and first not in layouts and not choices.chance(3):
            layouts |= {first: "colwise_cut", second: "rowwise_cut"}
    for place in every(walk(tree)):
        options = [name for name in OF_KIND.get(place.node["kind"], ()) if name in wanted - {"colwise_cut"}]
        if place.fqn not in layouts and options and not choices.chance(3):
            layouts[place.fqn] = choices.pick(options)
    return tuple(layouts.items())


def legal_layouts(layouts: Layouts, tree: Mapping[str, Any], ignored: Sequence[str], ranks: int) -> Layouts:
    """Return the layouts that have a meaning in a legal tree.

    Args:
        layouts: `(FQN, layout)`.
        tree: The legal tree.
        ignored: Modules that every rank trains alone: they stay whole.
        ranks: How many share one model; with one, nothing is cut.
    """
    if ranks == 1:
        return ()
    outside = tuple(f"{module}." for module in ignored) or (" ",)
    places = {place.fqn: place.node for place in every(walk(tree)) if not f"{place.fqn}.".startswith(outside)}
    asked = {fqn: name for fqn, name in layouts if fqn in places and name in OF_KIND.get(places[fqn]["kind"], ())}
    asked = {fqn: name for fqn, name in asked.items() if name != "sequence" or _is_of_rows(places[fqn])}
    asked = {fqn: name for fqn, name in asked.items() if name != "rowwise" or _every_rank_has(places[fqn], ranks)}
    shared = _shared_modules(parameters(tree))
    for first, others in shared.items():
        # A parameter has the same layout in all its modules.
        name = asked.get(first, "").removesuffix("_cut")
        asked |= dict.fromkeys(others, name)
    together = {fqn for others in shared.values() for fqn in others}
    paired: set[str] = set()
    for pair in _pairs(tree["nodes"], "", ranks):
        if tuple(map(asked.get, pair)) == ("colwise_cut", "rowwise_cut") and not together & set(pair):
            paired |= set(pair)
    legal = {fqn: name if fqn in paired else name.removesuffix("_cut") for fqn, name in asked.items()}
    return tuple((fqn, legal[fqn]) for fqn in places if legal.get(fqn))


def cut_dimension(layout: str, name: str, *, embeds: bool) -> int | None:
    """Return the dimension of a parameter that a layout divides among the ranks of one model; None: every rank holds it whole."""
    kind = layout.removesuffix("_cut")
    if kind not in ("colwise", "rowwise"):
        return None
    if name == "bias":  # the bias has a number for each output
        return 0 if kind == "colwise" else None
    return int((kind == "rowwise") != embeds)


def _is_of_rows(node: Node) -> bool:
    """Whether a module computes row by row, and each row needs all of its parameters."""
    return node["kind"] == "norm" or (node["kind"] == "scale" and get(node, "shape") == "vector")


def _every_rank_has(node: Node, ranks: int) -> bool:
    """Whether each rank has rows of a table that is cut by rows: torch's lookup raises on a rank that has none."""
    return node["kind"] != "embed" or (ranks - 1) * -(-get(node, "rows") // ranks) < get(node, "rows")


def _shared_modules(specs: Sequence[ParameterSpec]) -> dict[str, list[str]]:
    """Return the modules that share a parameter, by the first of them."""
    sharing: dict[Any, list[str]] = {}
    for spec in specs:
        if spec.tie:
            sharing.setdefault(spec.tie, []).append(spec.module)
    return {modules[0]: modules for modules in sharing.values() if len(modules) > 1}


def _pairs(nodes: Sequence[Node], prefix: str, ranks: int) -> Iterator[tuple[str, str]]:
    """Yield neighbours where the second can take the cut columns of the first without a gather, if the ranks divide them."""
    also = {get(node, "of") for node in nodes if node["kind"] == "again"}
    for node, following in zip(nodes, [*nodes[1:], None]):
        if node["kind"] == "group":
            yield from _pairs(get(node, "nodes"), f"{prefix}{node['name']}.", ranks)
        if following is None or {node["kind"], following["kind"]} != {"linear"}:
            continue
        if get(node, "out") % ranks == 0 and not {node["name"], following["name"]} & also:
            yield prefix + node["name"], prefix + following["name"]
