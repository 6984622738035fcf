"""What users may change about the reduction of gradients: when it happens (``no_sync``), and how (a hook of theirs)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fsdp_ref.errors import CommHookError, FsdpValueError, RootError, TrainingStateError, listing
from fsdp_ref.runtime.root import lazy_init
from fsdp_ref.runtime.unit import Unit
from fsdp_ref.states import TrainingState


@contextmanager
def no_sync(unit: Unit) -> Iterator[None]:
    """Let backward passes inside keep gradients local, for all units of a root's tree; may be nested. See ``api.trees``."""
    root = lazy_init(unit)
    if not unit.is_root:
        raise RootError(
            "`no_sync()` on inner FSDP instances is not supported. Please call `no_sync()` on root FSDP module: "
            f"expected the outermost unit, got {unit!r}. Use the module that you run."
        )
    if unit.training_state is not TrainingState.IDLE:
        raise TrainingStateError(
            f"no_sync: expected to be in states [{TrainingState.IDLE}] but current state is {unit.training_state}. "
            "Enter it outside of forward and summon_full_params."
        )
    # Each its own value: a unit may have been set by hand before (``set_requires_gradient_sync``).
    before = [each.sync_gradients for each in root.units]
    for each in root.units:
        each.sync_gradients = False
    try:
        yield
    finally:
        for each, value in zip(root.units, before):
            each.sync_gradients = value


def register_comm_hook(unit: Unit, state: Any, hook: Callable[..., Any]) -> None:
    """Let ``hook(state, grad[, output])`` replace reduction in every unit of a root's tree. See ``api.trees``."""
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
    if _takes_bucket(hook):
        raise CommHookError(
            f"register_comm_hook: expected hook(state, grad[, output]), got {getattr(hook, '__name__', hook)}, which takes a "
            "bucket of DDP. Use one of fsdp_ref.comm_hooks (fp16_compress_hook, bf16_compress_hook), or write one of that form."
        )
    for each in root.units:
        each.comm_hook, each.comm_hook_state = hook, state


def _takes_bucket(hook: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(hook).parameters.values()
    except (TypeError, ValueError):  # a callable of C++ says nothing of itself
        return False
    return any("GradBucket" in str(parameter.annotation) for parameter in parameters)
