"""Where are the units of a module tree, and what are its parameters called?

Depth-first, in ``modules()`` order, each unit once, without entering replicated subtrees.
Source: ``torch.distributed.fsdp._traversal_utils`` and ``_common_utils`` for what the answers mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsdp_ref.annotations import units_under
from fsdp_ref.naming import clean_tensor_name, join_fqn

if TYPE_CHECKING:
    from torch import nn


def unit_modules(root: nn.Module) -> list[nn.Module]:
    """Return the modules at or below ``root`` that are units."""
    return [module for _, module, _ in units_under(root)]


def units(root: nn.Module) -> list[Any]:
    """Return the units at or below ``root``; two modules of one unit give it once."""
    return list({id(unit): unit for _, _, unit in units_under(root)}.values())


def param_to_fqns(root: nn.Module, *, dedup_shared: bool = True) -> dict[nn.Parameter, list[str]]:
    """Map each parameter below ``root`` to its clean names.

    A flat parameter maps to the names of the originals it holds; any other parameter to its own name, or to all of
    them with ``dedup_shared=False`` when it is tied.

    Args:
        root: where names start.
        dedup_shared: keep only the first name of a tied parameter.
    """
    names: dict[nn.Parameter, list[str]] = {}
    handles = [unit.handle for unit in units(root) if getattr(unit, "handle", None) is not None]
    held = {id(handle.flat_param): list(handle.fqns) for handle in handles}
    for path, module in root.named_modules(remove_duplicate=False):
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            # The names a flat parameter holds are relative to the module that it is registered on.
            found = [clean_tensor_name(join_fqn(path, fqn)) for fqn in held.get(id(param), [name])]
            known = names.setdefault(param, [])
            if not known:
                known.extend(found)
            elif not dedup_shared:
                known.extend(fqn for fqn in found if fqn not in known)
    return names
