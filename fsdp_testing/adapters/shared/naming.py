"""The names that parameters and buffers of a wrapped model had before wrapping.

Wrappers insert a component into FQNs. Torch's components (FSDP1, activation checkpointing, compile, DDP at the root) are known
here; an adapter for a wrapper with another prefix gives its own `named_parameters`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

#: Components that wrappers of torch insert anywhere in an FQN.
INSERTED = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})


@functools.lru_cache(maxsize=4096)  # called for every event of every unit
def original(fqn: str) -> str:
    """`fqn` without the components that wrappers insert."""
    return ".".join(part for part in fqn.split(".") if part not in INSERTED)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside DDP, whose prefix `module` is a plain word and can only be taken off by looking at the type."""
    return unwrapped(model.module) if isinstance(model, DistributedDataParallel) else model


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """`(original FQN, parameter)` of every parameter, each object once under its first name."""
    for fqn, parameter in unwrapped(model).named_parameters():
        yield original(fqn), parameter


def named_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """`(original FQN, buffer)` of every buffer, each object once under its first name."""
    for fqn, buffer in unwrapped(model).named_buffers():
        yield original(fqn), buffer
