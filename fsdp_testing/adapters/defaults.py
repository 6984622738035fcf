"""What the harness does where an adapter leaves a method out.

Torch-style models name their methods alike (`no_sync`, `clip_grad_norm_`), have parameters that are complete or are
DTensors, and can be gathered. These defaults use only that, and nothing specific to one implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_testing.adapters.protocol import Piece, Setup, StateEntry
from fsdp_testing.adapters.shared import naming, pieces
from fsdp_testing.adapters.shared.checkpointing import checkpoint_outside
from fsdp_testing.errors import InvalidImplementation

_Given = Mapping[str, Callable[..., Any]]


def methods(implementation: object, given: _Given) -> dict[str, Callable[..., Any]]:
    """Return a default for every optional method of the protocol, made from the methods that are `given`."""
    name = str(getattr(implementation, "name", "?"))
    local = given.get("local_pieces") or _default_local_pieces(given)
    named = given.get("named_parameters", naming.named_parameters)

    def optimizer_pieces(model: nn.Module, optimizer: torch.optim.Optimizer) -> Mapping[str, Mapping[str, StateEntry]]:
        return pieces.optimizer_state(dict(named(model)), optimizer)

    filled: dict[str, Callable[..., Any]] = {
        "no_sync": _own_no_sync(name),
        "unshard_async": given.get("unshard", _missing(name, "unshard")),  # nothing is left to wait for
        "clip_grad_norm": clip_grad_norm,
        "local_pieces": local,
        "full_parameters": _gathering_full_parameters(local),
        "optimizer_pieces": optimizer_pieces,
        "named_parameters": naming.named_parameters,
        "named_buffers": naming.named_buffers,
        "division": lambda setup: None,
        "finish": lambda model: None,
        "recover": lambda model: None,
        "units": lambda model: (),
        "trace_units": lambda model, emit: nullcontext(),
        "gathered_bytes": lambda model: {},
        "build_optimizer": lambda model, make: make([parameter for _, parameter in named(model)]),
        "backward": lambda model, loss: loss.backward(),
        "grad_scaler": grad_scaler,
        "step": lambda model, optimizer: optimizer.step(),
        "zero_grad": _zero_grad,
    }
    return filled | {method: _missing(name, method) for method in OPTIONAL_WITHOUT_DEFAULT}


OPTIONAL_WITHOUT_DEFAULT = (
    "full_state_dict",
    "load_full_state_dict",
    "sharded_state_dict",
    "load_sharded_state_dict",
    "local_state_dict",
    "load_local_state_dict",
    "full_optimizer_state",
    "load_full_optimizer_state",
    "sharded_optimizer_state",
    "load_sharded_optimizer_state",
    "register_comm_hook",
    "unshard",
    "reshard",
)


def grad_scaler(model: nn.Module, **options: Any) -> torch.amp.GradScaler:
    """Return torch's own scaler, for the device that the parameters are on; over DTensors its ranks skip together."""
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    return torch.amp.GradScaler(device, **options)


def _zero_grad(model: nn.Module, optimizer: torch.optim.Optimizer | None, set_to_none: bool) -> None:
    """Clear through the optimizer if there is one, as training loops do; it clears exactly its own parameters."""
    owner: Any = model if optimizer is None else optimizer
    owner.zero_grad(set_to_none=set_to_none)


def checkpointing_outside(wrap: Callable[[nn.Module, Setup], nn.Module]) -> Callable[[nn.Module, Setup], nn.Module]:
    """`wrap`, and then recomputation around the wrapped modules if the setup requests it."""

    def wrap_then_checkpoint(module: nn.Module, setup: Setup) -> nn.Module:
        if not (setup.checkpointed and setup.checkpoint_outside):
            return wrap(module, setup)
        chosen = [module.get_submodule(name) for name in setup.checkpointed]
        model = wrap(module, replace(setup, checkpointed=()))
        checkpoint_outside(model, chosen, reentrant=setup.checkpoint_reentrant)
        return model

    return wrap_then_checkpoint


def clip_grad_norm(model: nn.Module, max_norm: float, norm_type: float, **options: bool) -> torch.Tensor:
    """Call the model's own `clip_grad_norm_` if it has one, else torch's, whose result over DTensors is made complete.

    Collectives: those of the model's method, or of DTensor's norm; every rank calls.
    """
    own = getattr(model, "clip_grad_norm_", None)
    clip: Callable[..., torch.Tensor] = own if callable(own) else partial(nn.utils.clip_grad_norm_, model.parameters())
    norm = clip(max_norm, norm_type, **options)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _own_no_sync(name: str) -> Callable[[nn.Module], AbstractContextManager[Any]]:
    absent = _missing(name, "no_sync", " The model has no `no_sync` of its own either.")

    def no_sync(model: nn.Module) -> AbstractContextManager[Any]:
        own = getattr(model, "no_sync", None)
        context: AbstractContextManager[Any] = own() if callable(own) else absent()
        return context

    return no_sync


def _missing(name: str, method: str, more: str = "") -> Callable[..., Any]:
    def refuse(*_args: object, **_kwargs: object) -> Any:
        raise InvalidImplementation(
            f"implementation {name!r}: expected the method `{method}`, got none. "
            f"Add it to the adapter, or do not claim the capability that needs it.{more}"
        )

    return refuse


def _default_local_pieces(given: _Given) -> Callable[[nn.Module], Mapping[str, tuple[Piece, ...]]]:
    full_parameters = given.get("full_parameters")
    named = given.get("named_parameters", naming.named_parameters)
    if full_parameters is not None:

        def through_gathering(model: nn.Module) -> Mapping[str, tuple[Piece, ...]]:
            flags = {fqn: parameter.requires_grad for fqn, parameter in named(model)}
            with full_parameters(model, writeback=False) as full:
                # Cloned: the complete tensors may be freed or overwritten when the context ends.
                copied = {fqn: tensor.detach().clone() for fqn, tensor in full.items()}
                flags = {fqn: flags.get(fqn, tensor.requires_grad) for fqn, tensor in full.items()}
            return {fqn: (pieces.whole(tensor.requires_grad_(flags[fqn])),) for fqn, tensor in copied.items()}

        return through_gathering

    return lambda model: pieces.of_parameters(named(model))


def _gathering_full_parameters(
    local_pieces: Callable[[nn.Module], Mapping[str, tuple[Piece, ...]]],
) -> Callable[..., AbstractContextManager[Mapping[str, torch.Tensor]]]:
    @contextmanager
    def full_parameters(model: nn.Module, *, writeback: bool) -> Iterator[Mapping[str, torch.Tensor]]:
        local = local_pieces(model)
        full = pieces.gather(local)
        yield full
        if writeback:
            pieces.scatter_back(full, local)

    return full_parameters
