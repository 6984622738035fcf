"""Makes a case's model, copies of it, inputs and loss, the same way in the engine and in the oracle."""

from __future__ import annotations

import copy
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import nn

from fsdp_testing.cases.models import MODELS, Inputs, ZooModel, loss_of, structure_of, tensors_in
from fsdp_testing.cases.models.tree import LEAVES, Tree, TreeGroup, tree_model
from fsdp_testing.cases.models.tree_schema import get
from fsdp_testing.cases.operations.operation import matching
from fsdp_testing.cases.records import UNIT_ROUNDOFF, Batch, Case
from fsdp_testing.errors import InvalidRecord


@dataclass(frozen=True, slots=True)
class Forwarded:
    """A finished forward: the loss, every floating-point tensor of the output in order, and the output's structure."""

    loss: torch.Tensor
    outputs: tuple[torch.Tensor, ...]
    structure: str

    def values(self) -> dict[str, torch.Tensor]:
        """Return detached copies by name, for reports."""
        shown = {f"output.{index}": tensor.detach().clone() for index, tensor in enumerate(self.outputs)}
        structure = torch.tensor(list(self.structure.encode()), dtype=torch.uint8)
        return {**shown, "loss": self.loss.detach().clone(), "structure": structure}


def derive(*parts: int | str) -> int:
    """Return a seed (63 bits) that is a function of `parts` alone, on every machine: the case's seed, and what it is for."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype called `name`."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise InvalidRecord(f"dtype: expected the name of a torch dtype, got {name!r}. Fix the case.")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return `float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def roundoff(dtype: torch.dtype) -> float:
    """Return the unit roundoff of a dtype; 0 where nothing is rounded."""
    return UNIT_ROUNDOFF.get(dtype_name(dtype), 0.0)


def zoo_model(case: Case) -> ZooModel:
    """Return the zoo's entry for the case's model.

    Raises:
        InvalidRecord: No such model.
    """
    if case.model.name == "tree":
        return tree_model(case.model.tree)
    model = MODELS.get(case.model.name)
    if model is None:
        raise InvalidRecord(
            f"case.model.name: expected one of {', '.join(sorted(MODELS))} or tree, got {case.model.name!r}. Fix the case."
        )
    return model


def build_model(case: Case) -> nn.Module:
    """Build the case's unwrapped model: equal values wherever it is built."""
    model = zoo_model(case)
    if case.model.tree is None:
        return _built(model, case)
    key = (id(model), case.seed, case.model.dtype, case.model.freeze)
    asked_before = key in _FIRST
    _, first = _FIRST.pop(key) if asked_before else (model, None)
    if first is None:
        first = _built(model, case)
    _FIRST[key] = (model, first if asked_before else None)
    if len(_FIRST) > _FIRST_KEPT:
        del _FIRST[next(iter(_FIRST))]
    if not asked_before:
        return first
    return replica_of(first, {id(p): nn.Parameter(p.detach().clone(), p.requires_grad) for p in first.parameters()})


_FIRST: dict[tuple[int, int, str, tuple[str, ...]], tuple[ZooModel, nn.Module | None]] = {}
"""The drawn models used last, each with an object that keeps its identity unique. A model that is requested again keeps a private
module, since copying it takes a quarter of the time. Most models are requested once, and need no copy."""
_FIRST_KEPT = 8


def _built(model: ZooModel, case: Case) -> nn.Module:
    module = model.build(derive(case.seed, "model"), dtype_of(case.model.dtype), **case.model.arguments)
    for _, parameter in matching(module.named_parameters(), case.model.freeze):
        parameter.requires_grad_(False)
    return module.train()


def most_uses(case: Case) -> int:
    """Return how often a forward pass may use one part: by repeated calls and under several names."""
    if case.model.tree is None:
        return 2 if zoo_model(case).needs & {"reused_modules", "shared_parameters"} else 1
    return _most_uses(case.model.tree["nodes"])


def _most_uses(nodes: Iterable[Mapping[str, Any]]) -> int:
    uses: dict[str, int] = {}
    for node in nodes:
        if node["kind"] == "again":
            uses[get(node, "of")] = 2 * uses.get(get(node, "of"), 1)
        else:
            uses[node["name"]] = get(node, "calls") * _most_uses(get(node, "nodes")) if node["kind"] == "group" else 1
    return max(uses.values(), default=1)


def uses_of(case: Case, fqn: str) -> int:
    """Return how often a forward pass may use one parameter; for a model of the zoo, any of its parameters."""
    if case.model.tree is None:
        return most_uses(case)
    return _uses_of(case.model.tree["nodes"], fqn.split("."))


def _uses_of(nodes: Iterable[Mapping[str, Any]], path: list[str]) -> int:
    uses = 1
    for node in nodes:
        if node["kind"] == "again":
            uses *= 2 if get(node, "of") == path[0] else 1
        elif node["kind"] == "group" and node["name"] == path[0]:
            uses *= get(node, "calls") * _uses_of(get(node, "nodes"), path[1:])
    return uses


def make_inputs(case: Case, batch: Batch, rank: int) -> Inputs:
    """Make the inputs of `rank`, in the model's own dtype."""
    rank = _with_inputs_of(case, batch, rank)
    usage = batch.usage_of(rank)
    options = {} if usage is None else {"use": usage}
    seed, dtype = derive(case.seed, "inputs") % 2**31, dtype_of(case.model.dtype)
    made = zoo_model(case).make_input(seed, rank, batch.seed, batch.rows_of(rank), dtype, **options)
    if batch.scale == 1.0:
        return made
    scaled = map_tensors(lambda t: t * batch.scale if t.is_floating_point() else t, (made.args, dict(made.kwargs)))
    return Inputs(*scaled)


def _with_inputs_of(case: Case, batch: Batch, rank: int) -> int:
    """Return the index of the inputs of `rank`: ranks that share one model have the same inputs."""
    return 0 if batch.alike else rank // case.world.tensor_parallel


def forward(
    model: Callable[..., Any],
    case: Case,
    batch: Batch,
    rank: int,
    inputs: Inputs,
    leaves: list[torch.Tensor] | None = None,
) -> Forwarded:
    """Call the model. The global generator is seeded first, so that dropout is a function of case, batch and rank.

    Floating-point inputs ask for gradients if there are `leaves`, to which they are added.
    """
    inputs = inputs if leaves is None else _asking_for_gradients(inputs, leaves)
    # Just before the call: earlier random numbers must not change what dropout drops.
    _seed(derive(case.seed, "forward", batch.seed, _with_inputs_of(case, batch, rank)))
    output = model(*inputs.args, **inputs.kwargs)
    return Forwarded(loss_of(output), tuple(tensors_in(output)), structure_of(output))


def gradients_of_rank(case: Case, batch: Batch, rank: int) -> tuple[dict[str, torch.Tensor], float]:
    """Return the gradients that one rank's inputs alone give the unwrapped model, by FQN, and how far rounding may move them."""
    model = build_model(case)
    forward(model, case, batch, rank, make_inputs(case, batch, rank)).loss.backward()
    gradients = {fqn: p.grad for fqn, p in model.named_parameters() if p.grad is not None}
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    return gradients, 64 * UNIT_ROUNDOFF[case.model.dtype] * largest  # inner products in another order


def penalised(model: Callable[..., Any], case: Case, batch: Batch, rank: int, inputs: Inputs) -> Forwarded:
    """Call the model as `forward` does; the squared gradient by the floating-point inputs is a part of the loss."""
    leaves: list[torch.Tensor] = []
    forwarded = forward(model, case, batch, rank, inputs, leaves)
    if not leaves or not forwarded.loss.requires_grad:
        return forwarded
    slopes = torch.autograd.grad(forwarded.loss, leaves, create_graph=True, allow_unused=True)
    squares = [slope.square().sum() for slope in slopes if slope is not None]
    return replace(forwarded, loss=sum(squares, forwarded.loss))


def _asking_for_gradients(inputs: Inputs, leaves: list[torch.Tensor]) -> Inputs:
    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            # New leaves: the inputs themselves require no gradient.
            tensor = tensor.detach().requires_grad_()
            leaves.append(tensor)
        return tensor

    return Inputs(*map_tensors(leaf, (inputs.args, dict(inputs.kwargs))))


def _seed(seed: int) -> None:
    """Seed torch's global generators; `torch.manual_seed` on a machine without CUDA notes a traceback at every call."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Apply `function` to every tensor in containers; mappings that are neither ordered nor dataclasses become dictionaries."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if is_dataclass(value) and not isinstance(value, type):
        own = {item.name: map_tensors(function, getattr(value, item.name)) for item in fields(value)}
        more = {key: item for key, item in value.items() if key not in own} if isinstance(value, dict) else {}
        result: Any = replace(value, **own)
        for key, item in more.items():
            result[key] = map_tensors(function, item)
        besides = {name: item for name, item in getattr(value, "__dict__", {}).items() if name not in own}
        getattr(result, "__dict__", {}).update(besides)
        return result
    if isinstance(value, Mapping):
        items = {key: map_tensors(function, item) for key, item in value.items()}
        return OrderedDict(items) if isinstance(value, OrderedDict) else items
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, item) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(function, item) for item in value)
    return value


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Cast every floating-point tensor in tuples, lists and dicts."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value)


def cast_inputs(module: nn.Module, dtype: torch.dtype) -> None:
    """Have the module cast the floating-point inputs of each forward."""
    module.register_forward_pre_hook(lambda _, args, kwargs: cast_floats((args, kwargs), dtype), with_kwargs=True)


def cast_outputs_back(module: nn.Module) -> None:
    """Have the module give the dtype that its first floating-point input had before hooks that were registered earlier."""
    came: list[torch.dtype] = []

    def note(_: nn.Module, args: Any) -> None:
        came.append(next(t.dtype for t in tensors_in(args) if t.is_floating_point()))

    module.register_forward_pre_hook(note, prepend=True)
    module.register_forward_hook(lambda _, __, output: cast_floats(output, came.pop()))


def cast_buffers(model: nn.Module, ignored: Iterable[str], dtype: torch.dtype) -> None:
    """Cast the floating-point buffers of a model, but for those of the ignored modules."""
    left = {inner for name in ignored for inner in model.get_submodule(name).modules()}
    for module in (module for module in model.modules() if module not in left):
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                module.register_buffer(name, buffer.to(dtype), name not in module._non_persistent_buffers_set)


_PLAIN = frozenset({Tree, TreeGroup, *LEAVES.values()})


def replica_of(module: nn.Module, parameters: Mapping[int, nn.Parameter]) -> nn.Module:
    """Return a copy of `module` with buffers of its own.

    Args:
        module: Unwrapped, as built.
        parameters: For the identity of each parameter, its replacement in the copy.
    """
    if all(type(inner) in _PLAIN for inner in module.modules()):
        return _copied(module, parameters, {}, {})
    return copy.deepcopy(module, dict(parameters))


def _copied(
    module: nn.Module,
    parameters: Mapping[int, nn.Parameter],
    modules: dict[int, nn.Module],
    buffers: dict[int, torch.Tensor],
) -> nn.Module:
    made = modules.get(id(module))
    if made is not None:
        return made
    # Entered before its parts are copied: a module with two names is one copy.
    made = modules[id(module)] = type(module).__new__(type(module))
    given = vars(module)
    fields: dict[str, Any] = {
        name: value.copy() if isinstance(value, (dict, set)) else value for name, value in given.items()
    }
    for name, parameter in given["_parameters"].items():
        fields["_parameters"][name] = None if parameter is None else parameters[id(parameter)]
    for name, buffer in given["_buffers"].items():
        fields["_buffers"][name] = None if buffer is None else buffers.setdefault(id(buffer), buffer.clone())
    for name, inner in given["_modules"].items():
        fields["_modules"][name] = None if inner is None else _copied(inner, parameters, modules, buffers)
    vars(made).update(fields)
    return made
