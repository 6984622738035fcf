"""Makes the module that a rank wraps: it holds the case's values, unless wrapping is to bring them.

Where rank 0's values are to be broadcast, the other ranks begin with other ones; where modules are to be initialised
while they are wrapped, their tensors are on the meta device until then. Ignored modules are nobody's to bring: they hold
the case's values from the beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from fsdp_testing.adapters.protocol import Setup
from fsdp_testing.cases.records import Case
from fsdp_testing.oracle.models import build_model

InitModule = Callable[[nn.Module], None]


def module_to_wrap(case: Case, rank: int, flags: Mapping[str, bool]) -> tuple[nn.Module, InitModule | None]:
    """Return the module that `rank` wraps, and what initialises a module of it; None if all tensors are there.

    Args:
        case: Its wrapping says what wrapping is to bring.
        rank: This rank.
        flags: `requires_grad` by name, where it is not that of a new model.
    """
    module = build_model(case)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(flags.get(name, parameter.requires_grad))
    outside = {inner for name in case.wrapping.ignored for inner in module.get_submodule(name).modules()}
    managed = [inner for inner in module.modules() if inner not in outside]
    if case.wrapping.sync_module_states and rank:
        _change_all(managed, rank)
    return module, _emptied(managed) if case.wrapping.meta_init else None


def move_what_is_ignored(module: nn.Module, setup: Setup) -> None:
    """Put ignored modules on the device of this rank, as their user does: wrapping moves what it manages."""
    for name in setup.ignored:
        module.get_submodule(name).to(setup.device)


def _change_all(modules: list[nn.Module], rank: int) -> None:
    """Give every parameter and buffer of these modules other values, of no rank's equal to another's."""
    tensors = [t for inner in modules for t in (*inner.parameters(recurse=False), *inner.buffers(recurse=False))]
    with torch.no_grad():
        for tensor in dict.fromkeys(tensors):
            tensor.copy_(~tensor if tensor.dtype == torch.bool else tensor + rank)


def _emptied(modules: list[nn.Module]) -> InitModule:
    """Put the modules' tensors on the meta device, and return what gives a module its own back, shared ones shared."""
    empty: dict[torch.Tensor, torch.Tensor] = {}
    full: dict[nn.Module, dict[str, torch.Tensor]] = {}
    for inner in modules:
        parameters = dict(inner.named_parameters(recurse=False, remove_duplicate=False))
        buffers = dict(inner.named_buffers(recurse=False, remove_duplicate=False))
        full[inner] = parameters | buffers
        for name, tensor in parameters.items():
            if tensor not in empty:
                empty[tensor] = nn.Parameter(torch.empty_like(tensor, device="meta"), tensor.requires_grad)
            setattr(inner, name, empty[tensor])
        for name, buffer in buffers.items():
            setattr(inner, name, torch.empty_like(buffer, device="meta"))

    def init_module(module: nn.Module) -> None:
        for name, tensor in full.get(module, {}).items():
            setattr(module, name, tensor)

    return init_module
