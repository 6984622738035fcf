"""How are gradients accumulated over several backward passes with one reduction at the end?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fsdp_ref.errors import RootError, TrainingStateError
from fsdp_ref.runtime.forward import lazy_init
from fsdp_ref.runtime.unit import Unit
from fsdp_ref.states import TrainingState


@contextmanager
def no_sync(unit: Unit) -> Iterator[None]:
    """Let backward passes inside keep gradients local, for all units of the tree; may be nested.

    Raises:
        RootError: ``unit`` is not the root.
        TrainingStateError: the unit is busy.
    """
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
    before = [each.synchronise(False) for each in root.units]
    try:
        yield
    finally:
        for each, value in zip(root.units, before):
            each.synchronise(value)
