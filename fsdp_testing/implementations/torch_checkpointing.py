"""How are modules made to recompute their activations, in every adapter of torch alike?"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from fsdp_testing.implementations.sites import replace_module


def checkpoint_modules(module: nn.Module, names: Sequence[str]) -> None:
    """Wrap the named modules with torch's (non-reentrant) activation checkpointing, innermost first."""
    for name in sorted(names, key=lambda fqn: fqn.count("."), reverse=True):
        inner = module.get_submodule(name)
        replace_module(module, inner, checkpoint_wrapper(inner, checkpoint_impl=CheckpointImpl.NO_REENTRANT))
