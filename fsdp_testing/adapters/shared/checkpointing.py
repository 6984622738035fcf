"""Finds and replaces a module in a tree, and makes it recompute its activations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from fsdp_testing.adapters.shared import naming
from fsdp_testing.errors import InvalidArgument, InvalidImplementation


def replace_module(root: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replace `old` by `new` wherever it is registered below `root`, so that a module with two names stays one module."""
    for parent in list(root.modules()):
        if parent is new:
            continue
        for name, child in list(parent._modules.items()):
            if child is old:
                setattr(parent, name, new)


def innermost_first(root: nn.Module, units: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """`(FQN, module)` of every unit, children before parents, each module once under its first name.

    FQNs are the original ones; if a recomputation wrapper is around a module, the wrapper is the unit.

    Raises:
        InvalidArgument: A name is not a module below `root`; all are listed.
    """
    modules: dict[str, nn.Module] = {}
    for fqn, module in root.named_modules(remove_duplicate=False):
        modules.setdefault(naming.original(fqn), module)
    unknown = [unit for unit in units if unit not in modules or unit == ""]
    if unknown:
        raise InvalidArgument(f"units: expected FQNs of submodules, got {unknown}. Choose among {sorted(modules)[1:]}.")
    chosen: dict[int, tuple[str, nn.Module]] = {}
    for unit in units:
        chosen.setdefault(id(modules[unit]), (unit, modules[unit]))
    return sorted(chosen.values(), key=lambda entry: entry[0].count("."), reverse=True)


def parameters_of(root: nn.Module, names: Iterable[str]) -> set[nn.Parameter]:
    """Every parameter inside the named modules."""
    return {parameter for name in names for parameter in root.get_submodule(name).parameters()}


def checkpoint_modules(module: nn.Module, names: Sequence[str], *, reentrant: bool = False) -> None:
    """Wrap the named modules of an unwrapped model with torch's activation checkpointing, innermost first."""
    for name in sorted(names, key=lambda fqn: fqn.count("."), reverse=True):
        _recompute(module, module.get_submodule(name), reentrant=reentrant)


def checkpoint_outside(model: nn.Module, modules: Sequence[nn.Module], *, reentrant: bool = False) -> None:
    """Do the same around the wrapped modules: around the outermost module with each original name.

    Raises:
        InvalidImplementation: The wrapped model no longer contains a module.
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
