"""How are modules made to recompute their activations, in every adapter of torch alike?"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from fsdp_testing.adapters.shared import naming
from fsdp_testing.adapters.shared.sites import replace_module
from fsdp_testing.errors import InvalidImplementation


def checkpoint_modules(module: nn.Module, names: Sequence[str], *, reentrant: bool = False) -> None:
    """Wrap the named modules of an unwrapped model with torch's activation checkpointing, innermost first."""
    for name in sorted(names, key=lambda fqn: fqn.count("."), reverse=True):
        _recompute(module, module.get_submodule(name), reentrant=reentrant)


def checkpoint_outside(model: nn.Module, modules: Sequence[nn.Module], *, reentrant: bool = False) -> None:
    """Do the same around what a wrapper made of these modules: the outermost of those with one original name.

    Raises:
        InvalidImplementation: A module is not in the wrapped model any more.
    """
    names = {inner: naming.original(fqn) for fqn, inner in model.named_modules()}
    lost = [type(inner).__name__ for inner in modules if inner not in names]
    if lost:
        raise InvalidImplementation(
            f"activation checkpointing: expected a wrapped model with the modules it was given, got one without {lost}. "
            "Do not claim `activation_checkpointing` if wrapping copies modules."
        )
    outermost: dict[str, nn.Module] = {}
    for inner, name in names.items():
        outermost.setdefault(name, inner)
    for name in sorted({names[inner] for inner in modules}, key=lambda fqn: fqn.count("."), reverse=True):
        _recompute(model, outermost[name], reentrant=reentrant)


def _recompute(root: nn.Module, module: nn.Module, *, reentrant: bool) -> None:
    way = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    replace_module(root, module, checkpoint_wrapper(module, checkpoint_impl=way))
