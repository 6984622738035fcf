"""Of which modules is a drawn model made? One class for each kind of node; groups call their nodes in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from fsdp_testing.zoo.model import generator, tensors_in
from fsdp_testing.zoo.outputs import Named, Opaque, Record
from fsdp_testing.zoo.tree_schema import Node, get

Use = tuple[bool, ...]


def dtype_named(name: str) -> torch.dtype:
    """Returns the torch dtype called `name`."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


class Nodes(list[Node]):
    """Nodes as a module keeps them: shared by its copies, since nobody changes them."""

    def __deepcopy__(self, _memo: dict[int, Any]) -> Nodes:
        return self


class TreeLinear(nn.Module):
    """A linear map, with tanh after it unless told otherwise."""

    bias: nn.Parameter | None

    def __init__(self, node: Node, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        own = get(node, "dtype")
        self._cast = bool(own)
        dtype = dtype_named(own) if own else dtype
        out = get(node, "out")
        strided = get(node, "strided")
        weight = torch.empty(width, out, dtype=dtype).t() if strided else torch.empty(out, width, dtype=dtype)
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.empty(out, dtype=dtype)) if get(node, "bias") else None
        self._act = get(node, "act")

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        inner = x.to(self.weight.dtype) if self._cast else x
        y = functional.linear(inner, self.weight, self.bias)
        y = torch.tanh(y) if self._act else y
        return y.to(x.dtype) if self._cast else y


class TreeScale(nn.Module):
    """Multiplies by one plus a parameter, whose shape may be (), (1,) or empty."""

    def __init__(self, node: Node, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        own = get(node, "dtype")
        shape = {"vector": (width,), "scalar": (), "one": (1,), "empty": (0,)}[get(node, "shape")]
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype_named(own) if own else dtype))

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        weight = self.weight.to(x.dtype)
        # A parameter without elements takes part all the same: its sum is zero.
        # Bounded, since the module may be called again and again on its own output.
        return torch.tanh(x) * (1 + (weight if weight.numel() else weight.sum()))


class TreeNorm(nn.Module):
    """Layer normalization."""

    def __init__(self, node: Node, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(width, dtype=dtype))

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        # One plus the weight keeps the size of activations; a large epsilon keeps the gradient of a constant row tame.
        return functional.layer_norm(x, self.weight.shape, 1 + self.weight, self.bias, eps=0.1)


class TreeConv(nn.Module):
    """A one-dimensional convolution along the width; the mean over its channels."""

    def __init__(self, node: Node, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        channels, kernel = get(node, "channels"), get(node, "kernel")
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(channels, dtype=dtype))

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        y = functional.conv1d(x.unsqueeze(1), self.weight, self.bias, padding=self.weight.shape[-1] // 2)
        return torch.tanh(y).mean(1)


class TreeEmbed(nn.Module):
    """Adds the embedding of each row's token; ids wrap around the number of rows."""

    def __init__(self, node: Node, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(get(node, "rows"), width, dtype=dtype))

    def forward(self, x: torch.Tensor, *, ids: torch.Tensor, **_: Any) -> torch.Tensor:
        return x + functional.embedding(ids % self.weight.shape[0], self.weight)


class TreeOffset(nn.Module):
    """A module that is called without inputs; its caller adds what it returns."""

    def __init__(self, node: Node, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype))

    def forward(self) -> torch.Tensor:
        return torch.sin(self.weight)


class TreeBuffer(nn.Module):
    """Adds a buffer: a constant, a running sum of what this rank has seen in training, or a counter."""

    def __init__(self, node: Node, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._style, self._name = get(node, "style"), get(node, "buffer")
        if self._style == "counter":
            value = torch.zeros((), dtype=torch.int64)
        elif self._style == "running":
            value = torch.zeros(width, dtype=dtype)
        else:
            value = torch.randn(width, generator=generator(width), dtype=torch.float64).to(dtype)
        self.register_buffer(self._name, value, persistent=get(node, "persistent"))
        self._twin = get(node, "twin")
        if self._twin:
            self.register_buffer("twin", torch.full((width,), 0.3, dtype=dtype))

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        held = self.get_buffer(self._name)
        x = x - self.get_buffer("twin").to(x.dtype) if self._twin else x
        if self.training and self._style == "running":
            held.mul_(0.5).add_(x.detach().sum(0).to(held.dtype), alpha=0.125)
        if self.training and self._style == "counter":
            held.add_(1)
        # Not the buffer itself: a later forward changes it in place, and autograd must not see that.
        return x + 0.1 * held.clone().to(x.dtype).tanh()


class TreeDropout(nn.Module):
    """Drops a quarter in training."""

    def __init__(self, node: Node, width: int, dtype: torch.dtype) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        return functional.dropout(x, 0.25, self.training)


LEAVES: Mapping[str, type[nn.Module]] = {
    "linear": TreeLinear,
    "scale": TreeScale,
    "norm": TreeNorm,
    "conv": TreeConv,
    "embed": TreeEmbed,
    "offset": TreeOffset,
    "buffer": TreeBuffer,
    "dropout": TreeDropout,
}


def pack(container: str, one: torch.Tensor, other: torch.Tensor) -> Any:
    """Puts two tensors into a container."""
    made: dict[str, Any] = {
        "tensor": one,
        "tuple": (one, other),
        "list": [one, None, other],
        "dict": {"one": one, "other": other, "kind": "dict"},
        "nested": {"both": [(one,), {"other": other}]},
        "named_tuple": Named(one, other),
        "dataclass": Record(one, (other, "text")),
        "opaque": Opaque(one, other),
    }
    return made[container]


class TreeGroup(nn.Module):
    """Calls its nodes in order; how it is called itself is its caller's affair, as told by its node."""

    kept: torch.Tensor | None

    def __init__(self, node: Node, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._nodes = Nodes(get(node, "nodes"))
        self._returns, self._view = get(node, "returns"), get(node, "view")
        self._keeps = get(node, "keeps")
        self.kept = None
        self.out = fill_with(self, self._nodes, width, dtype)

    def forward(self, x: torch.Tensor, *, ids: torch.Tensor, use: Use = ()) -> Any:
        x = run(self, self._nodes, x, ids, use)
        if self._keeps:
            self.kept = x
            return x * 0.5
        if self._view:
            return torch.cat([x, x], dim=-1)[:, : x.shape[-1]]
        if self._returns == "tensor":
            return x
        return pack(self._returns, x, torch.sin(x))


class Tree(nn.Module):
    """The root: takes rows of numbers, one token per row, and which branches run."""

    def __init__(self, tree: Mapping[str, Any], dtype: torch.dtype) -> None:
        super().__init__()
        self._nodes = Nodes(tree["nodes"])
        self._output = tree.get("output", "tensor")
        self.out = fill_with(self, self._nodes, tree["width"], dtype)

    def forward(self, x: torch.Tensor, *, ids: torch.Tensor, use: Use = ()) -> Any:
        x = run(self, self._nodes, x, ids, use)
        return pack(self._output, x, torch.cos(x))


def fill_with(parent: nn.Module, nodes: list[Node], width: int, dtype: torch.dtype) -> int:
    """Makes the modules of `nodes` as attributes of `parent` and returns the width that comes out."""
    outs: dict[str, int] = {}
    for node in nodes:
        name, kind = node["name"], node["kind"]
        if kind == "again":
            of = get(node, "of")
            parent.add_module(name, parent.get_submodule(of))
            width = outs[of]
        elif kind == "group":
            group = TreeGroup(node, width, dtype)
            parent.add_module(name, group)
            width = width if get(node, "dropped") else group.out
        else:
            parent.add_module(name, LEAVES[kind](node, width, dtype))
            width = get(node, "out") if kind == "linear" else width
        outs[name] = width
    return width


def run(parent: nn.Module, nodes: list[Node], x: torch.Tensor, ids: torch.Tensor, use: Use) -> torch.Tensor:
    """Calls the modules of `nodes` in order."""
    known = {node["name"]: node for node in nodes}
    for node in nodes:
        # Looked up at each call: an implementation may have put another module in this one's place.
        module = parent.get_submodule(node["name"])
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
    """What the caller makes of a group's output."""
    if get(node, "keeps"):
        return _take_kept(module)
    if get(node, "view"):
        result += 0.5
    tensors = tensors_in(result)
    return tensors[0] if len(tensors) == 1 else tensors[0] + 0.5 * tensors[1]


def _take_kept(module: nn.Module) -> torch.Tensor:
    """The intermediate that a group kept instead of what it returned, wherever a wrapper has put the group."""
    for inner in module.modules():
        if isinstance(inner, TreeGroup) and inner.kept is not None:
            kept, inner.kept = inner.kept, None  # else the graph of this step would live until the next
            return kept
    raise RuntimeError("the group kept nothing")
