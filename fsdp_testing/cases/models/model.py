"""A zoo model, and where its numbers come from.

Every number is drawn from a generator made for it: the values of a model and of an input are a function of their
arguments alone, on any rank of any world, and the global random state is left as it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import nn

LARGE = "large"
"""Trait of models that random cases leave out, since each takes seconds."""
ASKED_ALONE = "asked_alone"
"""Trait of models that random cases leave out: checks ask what they are about, in the precision that it needs."""


class Inputs(NamedTuple):
    """Arguments of the model: `model(*inputs.args, **inputs.kwargs)`."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class MakeInput(Protocol):
    """Inputs of one rank at one step; `options` are those of `ZooModel.input_options`."""

    def __call__(self, seed: int, rank: int, step: int, batch: int, dtype: torch.dtype, **options: Any) -> Inputs: ...


@dataclass(frozen=True, slots=True)
class ZooModel:
    """One small model with one trait, and all that is needed to train it.

    Attributes:
        name: Key in the registry.
        summary: The trait in one sentence.
        construct: Makes the module with any values; `build` replaces them.
        make_input: `(seed, rank, step, batch, dtype, **options) -> Inputs`; any batch size, 0 included.
        units: FQNs worth wrapping, outermost first (the root is always a unit too).
        traits: What the model has, for choosing models by trait.
        needs: Capabilities that an implementation must claim for this model.
        arguments: Keyword arguments of `build`, each with the values it may take (first: the default).
        input_options: The same for `make_input`.
        finish: Called with the module and dtype after the values are set, to redo what `module.to(dtype)` undid.
        elementwise_before: Linear layers with only elementwise functions between them and the linear layer before.
        constructed: The floating-point dtype of what `construct` makes, except for parts whose dtype `finish` sets;
            None if it is torch's default.
    """

    name: str
    summary: str
    construct: Callable[..., nn.Module]
    make_input: MakeInput
    units: tuple[str, ...]
    traits: frozenset[str] = frozenset()
    needs: frozenset[str] = frozenset()
    arguments: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    input_options: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    finish: Callable[[nn.Module, torch.dtype], None] | None = None
    elementwise_before: tuple[str, ...] = ()
    constructed: torch.dtype | None = None

    def build(self, seed: int, dtype: torch.dtype = torch.float64, **arguments: Any) -> nn.Module:
        """The model with its values; equal for equal arguments, wherever and however often it is called.

        Args:
            seed: Chooses the values.
            dtype: Dtype of all floating-point parameters and buffers, unless mixed dtypes are the model's trait.
            **arguments: Those of `arguments`.
        """
        with torch.random.fork_rng(devices=[]):  # the constructors of torch.nn draw values that are then replaced
            module = self.construct(**arguments)
        if dtype != self.constructed:
            module = module.to(dtype)
        fill(module, generator(seed))
        if self.finish is not None:
            self.finish(module, dtype)
        return module

    def loss(self, output: Any) -> torch.Tensor:
        """A scalar of every tensor in `output`: sums and no means, so that an empty batch gives zero and not NaN."""
        return loss_of(output)


Construct = TypeVar("Construct", bound=Callable[..., nn.Module])


class Family(list[ZooModel]):
    """The models of one file, in file order."""

    def model(
        self,
        name: str,
        make_input: MakeInput,
        units: tuple[str, ...],
        traits: str = "",
        needs: str = "",
        **more: Any,
    ) -> Callable[[Construct], Construct]:
        """Decorate a class, or a function that makes a module, as a model of this family.

        The first line of its docstring is the model's summary.

        Args:
            name: Key in the registry.
            make_input: As in `ZooModel`.
            units: As in `ZooModel`.
            traits: Separated by blanks.
            needs: Separated by blanks.
            **more: Other fields of `ZooModel`.
        """

        def register(construct: Construct) -> Construct:
            summary = next(iter((construct.__doc__ or "").splitlines()), "")  # python -OO has no docstrings
            sets = frozenset(traits.split()), frozenset(needs.split())
            self.append(ZooModel(name, summary, construct, make_input, units, *sets, **more))
            return construct

        return register


def forward_methods(module: nn.Module) -> tuple[tuple[str, str], ...]:
    """Return `(FQN, method)` of the methods beside forward that compute, as the classes of the modules list them."""
    modules = module.named_modules()
    return tuple((name, method) for name, inner in modules for method in getattr(type(inner), "forward_methods", ()))


class Wired(nn.Module):
    """Parts, and one expression that calls them.

    Args:
        flow: Called with the module and its inputs; it looks up parts as attributes at each call, since an implementation
            may have replaced one.
        **parts: Modules and parameters by name.
    """

    def __init__(self, flow: Callable[..., Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self._flow = flow
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._flow(self, *args, **kwargs)


def chain(calls: str, **parts: nn.Module) -> Wired:
    """Return parts that are called one after the other, with tanh between them.

    Args:
        calls: Names of the parts in the order of the calls, separated by blanks; the same one may come twice.
        **parts: The parts by name.
    """

    def flow(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        for place, name in enumerate(calls.split()):
            x = module.get_submodule(name)(torch.tanh(x) if place else x)
        return x

    return Wired(flow, **parts)


def layers(*made: nn.Module) -> Wired:
    """Return layers that are called one after the other, with tanh after each."""

    def flow(module: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in module.layers:
            x = torch.tanh(layer(x))
        return x

    return Wired(flow, layers=nn.ModuleList(made))


def generator(*key: int) -> torch.Generator:
    """A generator for one purpose; nearby keys give unrelated numbers."""
    mixed = 0x9E3779B97F4A7C15
    for part in key:
        mixed = ((mixed ^ (part + 0x632BE59BD9B4E019)) * 0xD1342543DE82EF95 + (mixed >> 29)) % 2**63
    return torch.Generator().manual_seed(mixed)


def fill(module: nn.Module, draw: torch.Generator) -> None:
    """Give every parameter values of a size that keeps activations of order one; drawn in float64, then rounded."""
    norms = (nn.LayerNorm, nn.modules.batchnorm._NormBase, nn.GroupNorm)
    scales = {id(m.weight) for m in module.modules() if isinstance(m, norms)}
    with torch.no_grad():
        for parameter in module.parameters():
            values = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
            fan_in = math.prod(parameter.shape[1:]) if parameter.ndim > 1 else 16
            values = values / math.sqrt(max(fan_in, 1)) * (1.0 if parameter.is_floating_point() else 1e4)
            parameter.copy_(values + 1.0 if id(parameter) in scales else values)


def features(seed: int, rank: int, step: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Floating-point input of one rank at one step, drawn in float64, then rounded."""
    return torch.randn(shape, generator=generator(seed, step, rank, 1), dtype=torch.float64).to(dtype)


def tokens(seed: int, rank: int, step: int, shape: tuple[int, ...], vocabulary: int) -> torch.Tensor:
    """Token ids of one rank at one step."""
    return torch.randint(0, vocabulary, shape, generator=generator(seed, step, rank, 2))


def float_input(width: int) -> MakeInput:
    """`make_input` for a model that takes one `[batch, width]` tensor."""

    def make_input(seed: int, rank: int, step: int, batch: int, dtype: torch.dtype, **_options: Any) -> Inputs:
        return Inputs((features(seed, rank, step, (batch, width), dtype),), {})

    return make_input


def loss_of(output: Any) -> torch.Tensor:
    """Half the sum of squares of every floating-point tensor in `output`, each weighted by its place."""
    terms = [0.5 * (1 + 0.25 * place) * tensor.square().sum() for place, tensor in enumerate(tensors_in(output))]
    total = terms[0]
    for term in terms[1:]:
        total = total + term.to(total.dtype)
    return total


def tensors_in(output: Any) -> list[torch.Tensor]:
    """Floating-point tensors of any nesting of containers and objects with attributes, in order."""
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, Mapping):
        return [tensor for value in output.values() for tensor in tensors_in(value)]
    if isinstance(output, (list, tuple)):
        return [tensor for value in output for tensor in tensors_in(value)]
    return tensors_in(_attributes(output) or {})


def _attributes(value: Any) -> Mapping[str, Any] | None:
    """Return the attributes of an object; None of one that has none, as numbers and texts have none."""
    if is_dataclass(value) and not isinstance(value, type):
        # One with slots has no dictionary.
        return {item.name: getattr(value, item.name) for item in fields(value)} | getattr(value, "__dict__", {})
    return getattr(value, "__dict__", None)


def structure_of(output: Any) -> str:
    """Types and keys of any nesting of containers and objects with attributes, as text."""
    if isinstance(output, torch.Tensor):
        return "tensor"
    name = type(output).__qualname__
    if isinstance(output, (list, tuple)):
        return f"{name}({', '.join(map(structure_of, output))})"
    parts = output if isinstance(output, Mapping) else _attributes(output)
    if parts is None:
        return name
    return f"{name}({', '.join(f'{key}={structure_of(value)}' for key, value in parts.items())})"
