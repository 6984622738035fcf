"""Reads a rank's part of each parameter, its gradient and moments, each buffer, and copies of the weights.

Read in place and without communication, whatever holds it: plain tensors, DDP, FSDP1, FSDP2 and other DTensors, `fsdp_ref`;
of DeepSpeed through its accessors, which communicate. Copies of the weights, as for a moving average, are looked for in the
variables of the functions that run at the last step, and some levels below in objects of its own classes, lists and dicts.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fsdp_testing.adapters.protocol import Piece, StateEntry
from fsdp_testing.adapters.shared import flat_pieces, naming, pieces
from fsdp_testing.adapters.shared.flat_pieces import FlatUnit
from fsdp_testing.base import compat
from fsdp_testing.oracle.models import roundoff
from fsdp_testing.train import deepspeed_engine
from fsdp_testing.train.spans import Span, block_of, span_of

Spans = dict[str, tuple[Span, ...]]
Held = Mapping[str, tuple[Piece, ...]]


def held_by(model: nn.Module, *, gradients: bool = True) -> Held:
    """Return this rank's part of each parameter of a model, by original name; communicates only for DeepSpeed.

    Args:
        model: That was run.
        gradients: Whether to read gradients, if these are not always available.
    """
    if deepspeed_engine.is_engine(model):
        return deepspeed_engine.held(model, gradients=gradients)
    units = _flat_units(model)
    parts: Held = (
        pieces.of_parameters(naming.named_parameters(model))
        if units is None
        else flat_pieces.local_pieces(model, units)
    )
    wrappers = _wrappers(model)
    return {_without(wrappers, name): held for name, held in parts.items()}


def begin_with(weights: Mapping[str, torch.Tensor], model: nn.Module, number: int) -> None:
    """Give a model other weights, in place.

    Args:
        weights: By name; those of a second model have its number before them.
        model: The model whose parameters are replaced.
        number: Number of the model.
    """
    prefix = f"model {number}: " if number else ""
    parts = {prefix + name: own for name, own in held_by(model, gradients=False).items()}
    pieces.scatter_back(weights, {name: own for name, own in parts.items() if name in weights})


Site = tuple[int, str]
"""A parameter's place of use: id of the module, and attribute."""


def sites_in(model: nn.Module) -> dict[Site, str]:
    """Return the original name of each parameter by where it is whole when it is used, whoever shards it in between."""
    engine = deepspeed_engine.is_engine(model)
    root = naming.unwrapped(model.module if engine else model)  # type: ignore[arg-type]  # of an engine
    names = [name for name, _ in naming.named_parameters(root)] if engine else [*held_by(model, gradients=False)]
    wrappers = _wrappers(model)
    paths = root.named_modules(remove_duplicate=False)
    modules = {_without(wrappers, f"{naming.original(path)}.").rstrip("."): module for path, module in paths}
    places = [(name, *name.rpartition(".")[::2]) for name in names]
    return {(id(modules[path]), attribute): name for name, path, attribute in places if path in modules}


def block_in(held: Iterable[tuple[Piece, ...]]) -> int:
    """Return how many elements of a model's tensors make a sum when this rank has some of them; 1 where all are kept."""
    return block_of(sum(torch.Size(parts[0].shape).numel() for parts in held if parts))


def moments_of(model: nn.Module, optimizer: torch.optim.Optimizer, block: int) -> dict[str, Spans]:
    """Return the optimizer's state of each parameter of a model, as {"weight": {"exp_avg": ...}}; scalars have the shape ()."""
    states: Mapping[str, Mapping[str, StateEntry]]
    if deepspeed_engine.is_engine(model):
        states = deepspeed_engine.moments(model)
    elif (units := _flat_units(model)) is None:
        states = pieces.optimizer_state(dict(naming.named_parameters(model)), optimizer)
    else:
        states = flat_pieces.optimizer_pieces(model, optimizer, units)
    wrappers = _wrappers(model)
    return {_without(wrappers, name): _entries(state, block) for name, state in states.items()}


def moments_of_tensors(
    tensors: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer, block: int
) -> dict[str, Spans]:
    """Return the optimizer's state of tensors that it steps in place of parameters, by the parameters' names."""
    named = {name: tensor for name, tensor in tensors.items() if tensor in optimizer.state}
    return {name: _entries(state, block) for name, state in pieces.optimizer_state(named, optimizer).items()}


def named_ids(model: nn.Module) -> dict[str, int]:
    """Return the id of the object that each parameter is, by original name."""
    wrappers = _wrappers(model)
    return {_without(wrappers, name): id(parameter) for name, parameter in naming.named_parameters(model)}


def buffers_of(model: nn.Module, block: int) -> Spans:
    """Return the buffers that a checkpoint of the model holds; a batch norm's count of calls is no number of the model."""
    wrappers = _wrappers(model)
    modules = naming.unwrapped(model).named_modules()
    kept = {
        naming.original(f"{prefix}.{name}".lstrip(".")) for prefix, m in modules for name in compat.saved_buffers(m)
    }
    return {
        _without(wrappers, name): spans_of(pieces.of_tensor(buffer), "value", block)
        for name, buffer in naming.named_buffers(model)
        if name in kept and not name.endswith("num_batches_tracked")
    }


def spans_of(held: tuple[Piece, ...], which: str, block: int = 1) -> tuple[Span, ...]:
    """Return what is kept of the values ("value") or gradients ("grad") of pieces; a gradient that is None counts as zeros."""
    spans = []
    for piece in held:
        tensor = getattr(piece, which)
        if tensor is None and which == "grad" and piece.value is not None:
            tensor = torch.zeros_like(piece.value)
        if tensor is not None:
            spans.append(span_of(piece, tensor, block))
    return tuple(spans)


def _entries(state: Mapping[str, StateEntry], block: int) -> Spans:
    return {
        what: spans_of(entry, "value", block)
        if isinstance(entry, tuple)
        else (Span((), 0, 1, torch.tensor([entry], dtype=torch.float64)),)
        for what, entry in state.items()
    }


def _flat_units(model: nn.Module) -> Iterator[FlatUnit] | None:
    torch_fsdp, ours = sys.modules.get("torch.distributed.fsdp"), sys.modules.get("fsdp_ref")
    if torch_fsdp is not None and any(isinstance(m, torch_fsdp.FullyShardedDataParallel) for m in model.modules()):
        from fsdp_testing.adapters.torch import fsdp1

        return fsdp1.flat_units(model)
    if ours is not None:
        from fsdp_testing.adapters.ref import adapters

        return adapters.flat_units(model)
    return None


def unreduced_in(model: nn.Module) -> tuple[str, ...]:
    """Return the parameters of FSDP2 with a gradient that waits on this rank for a later backward to reduce it.

    It is kept away from the optimizer on every number of ranks, one included, so that no comparison shows it.
    """
    torch_fsdp = sys.modules.get("torch.distributed.fsdp")
    if torch_fsdp is None or not any(isinstance(m, torch_fsdp.FSDPModule) for m in model.modules()):
        return ()
    from fsdp_testing.adapters.torch import unit_trace

    return unit_trace.fsdp2_unreduced(model)


def is_rounded(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether `one` is `other` in its own dtype; nothing is cast to it here, since each cast may be made to round otherwise."""
    one, other = one.reshape(-1), other.reshape(-1)
    if one.dtype == other.dtype:
        return torch.equal(one, other)
    wide = one.double()
    return bool(((wide - other.double()).abs() <= 1.001 * roundoff(one.dtype) * wide.abs()).all())


def stale_in(model: nn.Module) -> tuple[str, ...]:
    """Return the parameters that FSDP2 keeps unsharded with other values than the shards have: the next forward uses them."""
    torch_fsdp = sys.modules.get("torch.distributed.fsdp")
    if torch_fsdp is None or not any(isinstance(m, torch_fsdp.FSDPModule) for m in model.modules()):
        return ()
    from fsdp_testing.adapters.torch import unit_trace

    return tuple(
        name
        for name, shard, full in unit_trace.fsdp2_unsharded(model)
        for piece in pieces.of_tensor(shard)
        if piece.value is not None and not is_rounded(full.detach().reshape(-1)[piece.start : piece.stop], piece.value)
    )


def shares_in(model: nn.Module) -> dict[str, None]:
    """Return this rank's places along mesh axes by which DTensors are sharded and that no FSDP gathers: of tensor parallelism."""
    torch_fsdp = sys.modules.get("torch.distributed.fsdp")
    gathered = torch_fsdp is not None and any(isinstance(m, torch_fsdp.FSDPModule) for m in model.modules())
    shares: dict[str, None] = {}
    for parameter in model.parameters():
        placements = getattr(parameter, "placements", ())
        first = 1 if gathered else 0
        # With several replicas FSDP shards by the second axis.
        if gathered and placements and placements[0].is_replicate():
            continue
        for axis, placement in enumerate(placements):
            if axis >= first and not placement.is_replicate():
                mesh = parameter.device_mesh  # type: ignore[attr-defined]  # of a DTensor
                shares[f"{(mesh.mesh_dim_names or range(mesh.ndim))[axis]} {mesh.get_local_rank(axis)}"] = None
    return shares


def _wrappers(model: nn.Module) -> list[str]:
    replicated = [name for name, m in model.named_modules() if name and isinstance(m, DistributedDataParallel)]
    return [f"{naming.original(name)}.module." for name in replicated]


def _without(wrappers: list[str], name: str) -> str:
    for prefix in wrappers:
        if name.startswith(prefix):
            return prefix.removesuffix("module.") + name.removeprefix(prefix)
    return name


_FOREIGN = frozenset({"torch", "numpy", "fsdp_testing", "builtins", *sys.stdlib_module_names} - {"__main__"})

_LEVELS, _MOST_ITEMS, _MOST_OBJECTS = 4, 1000, 20_000


def copies_in(
    variables: Sequence[Mapping[str, Any]], models: Sequence[nn.Module], block: int, ran: Collection[nn.Module]
) -> tuple[dict[str, Spans], tuple[str, ...]]:
    """Return what this rank has of each other copy of the models' weights, by the name of its variable; and those that ran.

    Where there is none, objects that are named like a moving average are returned with nothing.

    Args:
        variables: Variables of each function, or of the script.
        models: Those that are trained.
        block: Number of elements per sum, for larger tensors.
        ran: Modules that the script called.
    """
    copies: dict[str, Spans] = {}
    called: list[str] = []
    averages: dict[str, Spans] = {}
    trained = {id(part) for model in models for part in model.modules()}
    with suppress(Exception):  # an odd variable must not end a training that is only watched
        parts = {name: held for model in models for name, held in held_by(model).items() if held}
        for name, value in _named(variables):
            if isinstance(value, nn.Module) and not trained.isdisjoint(map(id, value.modules())):
                continue
            with suppress(Exception):
                spans = _spans(value, parts, block)
                if spans:
                    name = name if name not in copies else f"{name}, number {len(copies)}"
                    copies[name] = spans
                    is_called = isinstance(value, nn.Module) and any(part in ran for part in value.modules())
                    called += [name] if is_called else []
                elif _is_average(name, value):
                    averages[name] = {}
    return copies or averages, tuple(called)


def buffers_beside(variables: Sequence[Mapping[str, Any]], models: Sequence[nn.Module], block: int) -> Spans:
    """Return the buffers of modules that share no part with the trained models, by the names of variable and buffer."""
    buffers: Spans = {}
    known = {id(part) for model in models for part in model.modules()}
    with suppress(Exception):  # as for copies
        for name, value in _named(variables):
            if isinstance(value, nn.Module) and known.isdisjoint(map(id, value.modules())):
                known.update(map(id, value.modules()))
                held = {f"{name}.{key}": pieces.of_tensor(tensor) for key, tensor in value.named_buffers()}
                buffers |= {key: spans_of(parts, "value", block) for key, parts in held.items()}
    return buffers


def _is_average(name: str, value: Any) -> bool:
    """Whether an object, other than a number, a text or code, is named like a moving average of weights."""
    words = name.rpartition(".")[2].lower().split("_")
    return (
        not {"ema", "swa"}.isdisjoint(words)
        and (hasattr(value, "__dict__") or isinstance(value, (list, dict)))
        and (
            not isinstance(value, (torch.Tensor, type)) and not inspect.isroutine(value) and not inspect.ismodule(value)
        )
    )


def _named(variables: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield what variables hold, each object once, under the shortest of its names."""
    level = [item for scope in variables for item in list(scope.items()) if not item[0].startswith("__")]
    known: set[int] = set()
    for _ in range(_LEVELS):
        below: list[tuple[str, Any]] = []
        for name, value in level:
            if id(value) not in known and len(known) < _MOST_OBJECTS:
                known.add(id(value))
                yield name, value
                below += _parts(name, value)
        level = below


def _parts(name: str, value: Any) -> Iterable[tuple[str, Any]]:
    if type(value) in (list, tuple, dict):
        items = value.items() if type(value) is dict else enumerate(value)
        return (
            [(f"{name}[{key!r}]", part) for key, part in items if isinstance(key, (str, int))]
            if len(value) <= _MOST_ITEMS
            else ()
        )
    if isinstance(value, nn.Module):
        own = {
            **dict(value.named_children()),
            **{key: part for key, part in vars(value).items() if not key.startswith("_")},
        }
    elif type(value).__module__.partition(".")[0] in _FOREIGN or isinstance(value, type):
        return ()
    else:
        own = getattr(value, "__dict__", {})
    return [(f"{name}.{key}", part) for key, part in own.items()]


def _spans(value: Any, parts: Held, block: int) -> Spans:
    if isinstance(value, nn.Module):
        own = {name.removeprefix("module."): held for name, held in held_by(value).items()}
    elif isinstance(value, Mapping):
        tensors = {
            naming.original(name).removeprefix("module."): tensor
            for name, tensor in value.items()
            if isinstance(name, str) and isinstance(tensor, torch.Tensor)
        }
        own = {name: _copied(tensor, parts.get(name, ())) for name, tensor in tensors.items()}
    elif isinstance(value, list) and len(value) == len(parts) and all(type(part) is torch.Tensor for part in value):
        own = {name: _copied(tensor, held) for (name, held), tensor in zip(parts.items(), value)}
    else:
        return {}
    # What shares the memory of the weights is no copy: a state that one world took over, and another one copied.
    weights = {storage for held in parts.values() for storage in _storages(held)}
    fitting = {
        name: held
        for name, held in own.items()
        if held and name in parts and parts[name][0].shape == held[0].shape and weights.isdisjoint(_storages(held))
    }
    return {name: spans_of(held, "value", block) for name, held in fitting.items()}


def _storages(held: Iterable[Piece]) -> Iterator[int]:
    values = (piece.value for piece in held if piece.value is not None and piece.value.numel())
    return (value.untyped_storage().data_ptr() for value in values)


def _copied(tensor: torch.Tensor, held: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """Return the pieces of a copy; a plain tensor as large as this rank's shard of the parameter has the shard's pieces."""
    ends = [*accumulate((piece.stop - piece.start for piece in held), initial=0)]
    whole = held and ends[-1] == torch.Size(held[0].shape).numel()
    if not held or whole or hasattr(tensor, "to_local") or tensor.numel() != ends[-1]:
        return pieces.of_tensor(tensor)
    flat = tensor.detach().reshape(-1)
    return tuple(
        replace(piece, value=flat[start:stop], grad=None) for piece, (start, stop) in zip(held, pairwise(ends))
    )
