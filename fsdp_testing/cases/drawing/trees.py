"""Draws a module tree, as plain data that `cases/models/tree.py` builds."""

from __future__ import annotations

from typing import Any

from fsdp_testing.cases.drawing.choices import Choices
from fsdp_testing.cases.drawing.features import Swarm
from fsdp_testing.cases.models.tree_schema import legal_tree

# Even, odd, one, fewer than ranks; more would add shapes, and each new shape costs DTensor milliseconds.
_USUAL_WIDTHS = (4, 5, 1, 3)
_WIDTHS = (4, 5, 1, 2, 3, 6, 7, 8)
_LARGE = 48
_NAMES = "abcdefghijklmnopqrstuvwxyz"
_CONTAINERS = ("tuple", "dict", "list", "nested", "named_tuple", "dataclass")
_SHAPES = {"tree.vector": "vector", "tree.scalar": "scalar", "tree.one": "one", "tree.empty": "empty"}

Node = dict[str, Any]


def draw_tree(choices: Choices, swarm: Swarm) -> dict[str, Any]:
    """Draw a legal tree of one to about ten nodes."""
    drawer = _TreeDrawer(choices, swarm)
    tree: dict[str, Any] = {"width": drawer.entering, "nodes": drawer.nodes(1, 4, 0)}
    if "tree.container" in swarm and choices.chance(2):
        tree["output"] = drawer.container()
    return legal_tree(tree)


class _TreeDrawer:
    def __init__(self, choices: Choices, swarm: Swarm) -> None:
        self._choices = choices
        self._swarm = swarm
        self._leaves = ["linear", "linear"]
        self._leaves += [
            kind for kind in ("norm", "conv", "embed", "offset", "buffer", "dropout") if f"tree.{kind}" in swarm
        ]
        self._shapes = [shape for feature, shape in _SHAPES.items() if feature in swarm]
        self._leaves += ["scale"] if self._shapes else []
        # One recurring width, so that residuals, ties and repeated calls often fit.
        self._usual = self._choices.pick(_WIDTHS if self._choices.chance(4) else _USUAL_WIDTHS)
        self._branches = 0
        self._forced: int | None = None
        self.entering = self._current = self.width()

    def width(self) -> int:
        if self._forced is not None:
            return self._forced
        if "tree.large" in self._swarm and self._choices.chance(4):
            return _LARGE
        if self._choices.chance(4):
            return self._choices.pick(_WIDTHS if self._choices.chance(4) else _USUAL_WIDTHS)
        return self._usual

    def nodes(self, least: int, most: int, depth: int) -> list[Node]:
        """Draw a list that may end after each node, so that shrinking can leave out any node."""
        made: list[Node] = []
        while len(made) < least or (len(made) < most and self._choices.more(3)):
            node = self._node(made, depth)
            node["name"] = _NAMES[len(made)]
            made.append(node)
        return made

    def _node(self, before: list[Node], depth: int) -> Node:
        choices, swarm = self._choices, self._swarm
        if "tree.group" in swarm and depth < 3 and choices.chance(2):
            return self._group(depth)
        if "tree.alias" in swarm and before and choices.chance(4):
            return {"kind": "again", "of": choices.pick(before)["name"]}
        kind = choices.pick(self._leaves)
        node: Node = {"kind": kind}
        if kind == "linear":
            node["out"] = self._current = self.width()
            self._decorate_linear(node)
        elif kind == "scale":
            node["shape"] = choices.pick(self._shapes)
        elif kind == "conv":
            node["channels"], node["kernel"] = choices.integer(1, 3), choices.pick((3, 1))
        elif kind == "embed":
            node["rows"] = choices.pick((7, 1, 2, 3, 5, 13))
            self._tie(node)
        elif kind == "buffer":
            node["style"] = choices.pick(("constant", "running", "counter"))
            node["persistent"] = not choices.chance(3)
            node["buffer"] = choices.pick(("offset", "shift", "total"))
            node["twin"] = choices.chance(3)
        if "tree.frozen" in swarm and kind not in ("buffer", "dropout") and choices.chance(3):
            node["frozen"] = choices.pick(("all", "bias", "weight"))
        return node

    def _decorate_linear(self, node: Node) -> None:
        choices, swarm = self._choices, self._swarm
        if choices.chance(4):
            node["bias"] = False
        if "tree.strided" in swarm and choices.chance(3):
            node["strided"] = True
        if "tree.mixed_dtype" in swarm and choices.chance(4):
            node["dtype"] = choices.pick(("float32", "float64"))
        self._tie(node)

    def _tie(self, node: Node) -> None:
        if "tree.tied" in self._swarm and self._choices.chance(2):
            node["tie"] = "t"

    def _group(self, depth: int) -> Node:
        choices, swarm = self._choices, self._swarm
        node: Node = {"kind": "group"}
        if "tree.residual" in swarm and choices.chance(2):
            node["residual"] = True
        if "tree.calls" in swarm and choices.chance(2):
            node["calls"] = choices.integer(2, 3)
        if "tree.branch" in swarm and not choices.chance(3):
            node["branch"] = self._branches % 3
            self._branches += 1
        if "tree.dropped" in swarm and choices.chance(3):
            node["dropped"] = True
        self._fill(node, depth)
        if "tree.container" in swarm and choices.chance(2):
            node["returns"] = self.container()
        if "tree.view" in swarm and choices.chance(2):
            node["view"] = True
        if "tree.keeps" in swarm and choices.chance(2):
            node["keeps"] = True
        return node

    def _fill(self, node: Node, depth: int) -> None:
        """Draw the inside of a group; if its output must fit its input, every width inside equals that of the input."""
        entering, before = self._current, self._forced
        fits = len(node) > 1
        self._forced = entering if fits else before
        node["nodes"] = self.nodes(0 if depth else 1, 3, depth + 1)
        self._forced = before
        self._current = entering if fits else self._current

    def container(self) -> str:
        """Return a kind of container."""
        if "tree.opaque" in self._swarm and self._choices.chance(3):
            return "opaque"
        return self._choices.pick(_CONTAINERS)
