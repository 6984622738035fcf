"""How does a user's own gradient reduction get into all units?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsdp_ref.errors import CommHookError, FsdpValueError, listing
from fsdp_ref.runtime.forward import lazy_init
from fsdp_ref.runtime.unit import Unit


def register_comm_hook(unit: Unit, state: Any, hook: Callable[..., Any]) -> None:
    """Let ``hook(state, grad[, output])`` replace reduction in every unit of the tree.

    Raises:
        CommHookError: not the root; a hook is there already; or a hybrid unit, whose two-level reduction has no hook.
        FsdpValueError: ``hook`` is not callable.
    """
    root = lazy_init(unit)
    if not unit.is_root:
        raise CommHookError("register_comm_hook can only be called on a root instance.")
    hybrid = [repr(each) for each in root.units if each.config.hybrid]
    if hybrid:
        raise CommHookError(
            f"Communication hook is not supported for hybrid strategies: expected units over one group, got {listing(hybrid)}."
            " Use another strategy."
        )
    if any(each.comm_hook is not None for each in root.units):
        raise CommHookError("A communication hook is already registered")
    if not callable(hook):
        raise FsdpValueError(f"The communication hook must be callable: expected a function, got {hook!r}. Pass one.")
    for each in root.units:
        each.hook(state, hook)
