"""How are modules made to recompute their activations, in every adapter of torch alike?"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from fsdp_testing.implementations import naming
from fsdp_testing.implementations.sites import replace_module


def checkpoint_modules(module: nn.Module, names: Sequence[str], *, reentrant: bool = False) -> None:
    """Wrap the named modules of an unwrapped model with torch's activation checkpointing, innermost first."""
    for name in sorted(names, key=lambda fqn: fqn.count("."), reverse=True):
        _recompute(module, module.get_submodule(name), reentrant=reentrant)


def checkpoint_outside(model: nn.Module, names: Sequence[str], *, reentrant: bool = False) -> None:
    """The same around what a wrapper made of these modules: of several modules with one original name the outermost."""
    inside = naming.unwrapped(model)
    outermost: dict[str, nn.Module] = {}
    for fqn, module in inside.named_modules():
        outermost.setdefault(naming.original(fqn), module)
    for name in sorted(names, key=lambda fqn: fqn.count("."), reverse=True):
        _recompute(inside, outermost[name], reentrant=reentrant)


def _recompute(root: nn.Module, module: nn.Module, *, reentrant: bool) -> None:
    way = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    replace_module(root, module, checkpoint_wrapper(module, checkpoint_impl=way))
