"""Looking into a sharded module tree, under torch's names: states (here: units), handles, roots, names.

Source: ``torch.distributed.fsdp._traversal_utils``, ``_common_utils`` and ``_runtime_utils`` for the names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsdp_ref.annotations import is_replicated, units_under
from fsdp_ref.build.traversal import param_to_fqns, unit_modules, units
from fsdp_ref.naming import FLAT_PARAM, FSDP_PREFIX, clean_tensor_name, replace_prefix
from fsdp_ref.runtime.root import lazy_init
from fsdp_ref.storage.views import is_flattened

if TYPE_CHECKING:
    from torch import nn

    from fsdp_ref.handle.flat_handle import FlatHandle

__all__ = [
    "FLAT_PARAM",
    "FSDP_PREFIX",
    "clean_tensor_name",
    "is_flattened",
    "param_to_fqns",
    "replace_prefix",
    "unit_modules",
    "units",
]


def _composable(module: nn.Module) -> bool:
    """Tell whether sharding may enter ``module``: no other parallelism was applied to it."""
    return not is_replicated(module)


def _get_fsdp_states_with_modules(module: nn.Module) -> tuple[list[Any], list[nn.Module]]:
    """Return the units at or below ``module`` and the modules that hold them, depth first."""
    found = units_under(module)
    return [unit for _, _, unit in found], [holder for _, holder, _ in found]


def _get_fsdp_states(module: nn.Module) -> list[Any]:
    """Return the units at or below ``module``, depth first."""
    return units(module)


def _get_fsdp_handles(module: nn.Module) -> list[FlatHandle]:
    """Return the handles of the units at or below ``module``, depth first; units without one are left out."""
    return [unit.handle for unit in units(module) if unit.handle is not None]


def _get_fsdp_root_states(module: nn.Module) -> list[Any]:
    """Return the units at or below ``module`` that are roots; decides it where it is open."""
    found = units(module)
    for unit in found:
        lazy_init(unit)
    return [unit for unit in found if unit.is_root]


_get_param_to_fqns = param_to_fqns
_is_fsdp_flattened = is_flattened
