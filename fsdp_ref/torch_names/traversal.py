"""Looking into a sharded module tree, under torch's names: states (here: units), handles, roots, names.

Source: ``torch.distributed.fsdp._traversal_utils``, ``_common_utils`` and ``_runtime_utils`` for the names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsdp_ref.annotations import is_replicated, units_in, units_under
from fsdp_ref.errors import FsdpValueError
from fsdp_ref.naming import FLAT_PARAM, FSDP_PREFIX, clean_tensor_name, join_fqn
from fsdp_ref.runtime.root import lazy_init
from fsdp_ref.storage.views import is_flattened

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from torch import nn

    from fsdp_ref.handle.flat_handle import FlatHandle
    from fsdp_ref.runtime.unit import Unit

__all__ = ["FLAT_PARAM", "FSDP_PREFIX", "clean_tensor_name", "replace_prefix"]

_is_fsdp_flattened = is_flattened
_get_fsdp_states = units_in


def _composable(module: nn.Module) -> bool:
    """Return whether sharding may enter ``module``: no other parallelism was applied to it."""
    return not is_replicated(module)


def _get_fsdp_states_with_modules(module: nn.Module) -> tuple[list[Unit], list[nn.Module]]:
    """Return the units at or below ``module`` and the modules that users call for them, depth first."""
    found = units_under(module)
    return [unit for _, _, unit in found], [called for _, called, _ in found]


def _get_fsdp_handles(module: nn.Module) -> list[FlatHandle]:
    """Return the handles of the units at or below ``module``, depth first; units without one are left out."""
    return [unit.handle for unit in units_in(module) if not unit.handle.empty]


def _get_fsdp_root_states(module: nn.Module) -> list[Unit]:
    """Return the units at or below ``module`` that are roots; decide it where it is open."""
    found = units_in(module)
    for unit in found:
        lazy_init(unit)
    return [unit for unit in found if unit.is_root]


def _get_param_to_fqns(root: nn.Module, *, dedup_shared: bool = True) -> dict[nn.Parameter, list[str]]:
    """Return the clean names of each parameter below ``root``.

    Args:
        root: Where names start.
        dedup_shared: Keep only the first name of a tied parameter.

    Returns:
        For a flat parameter the names of the originals in it; for any other parameter its own name, or all of them
        with ``dedup_shared=False`` when it is tied.
    """
    names: dict[nn.Parameter, list[str]] = {}
    originals = {id(handle.flat_param): list(handle.fqns) for handle in _get_fsdp_handles(root)}
    for path, module in root.named_modules(remove_duplicate=False):
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            # The names in a flat parameter are relative to the module that it is registered on.
            found = [clean_tensor_name(join_fqn(path, fqn)) for fqn in originals.get(id(param), [name])]
            known = names.setdefault(param, [])
            if not known:
                known.extend(found)
            elif not dedup_shared:
                known.extend(fqn for fqn in found if fqn not in known)
    return names


def replace_prefix(mapping: MutableMapping[str, Any], old: str, new: str) -> None:
    """Rename, in place and in order, the keys that start with ``old``; reversible by swapping the arguments.

    Raises:
        FsdpValueError: Both prefixes are equal, so that the call would do nothing.
    """
    if old == new:
        raise FsdpValueError(
            f"replace_prefix: expected two different prefixes, got {old!r} twice. Pass the old and the new."
        )
    for key in list(mapping):
        value = mapping.pop(key)
        mapping[new + key.removeprefix(old) if key.startswith(old) else key] = value
