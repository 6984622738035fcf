"""Where does a module hang in a tree, and how is it replaced at every one of these places?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from fsdp_testing.adapters.shared import naming
from fsdp_testing.errors import InvalidArgument


def replace_module(root: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put `new` wherever `old` is registered below `root`, so that a module under two names stays one module."""
    for parent in list(root.modules()):
        if parent is new:
            continue
        for name, child in list(parent._modules.items()):
            if child is old:
                setattr(parent, name, new)


def innermost_first(root: nn.Module, units: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """`(FQN, module)` of every unit, children before parents, each module once under its first name.

    FQNs are the original ones; where recomputation was put around a module, that is the unit.

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
