"""Makes the planned units.

The one path behind the wrapper and the composable API. First everything is decided and checked (``ignored``, ``targets``,
``plan``, ``resolve``), so a refused call has changed nothing. Then parameters get their values, and units are made, children
first.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from fsdp_ref.annotations import set_unit, unit_of, walk
from fsdp_ref.build.ignored import Ignored, has_its_own
from fsdp_ref.build.materialize import broadcast_states, materialize_units, move_states
from fsdp_ref.build.plan import PlannedUnit, check_frozen, make_plan
from fsdp_ref.build.resolve import ResolvedUnit, resolve_units
from fsdp_ref.build.targets import choose_targets
from fsdp_ref.compat import keep_compiler_out
from fsdp_ref.handle.flat_handle import FlatHandle
from fsdp_ref.runtime.guards import UNIT_MADE, UNIT_WATCHES
from fsdp_ref.runtime.unit import Unit
from fsdp_ref.storage.views import ManagedParam

Connect = Callable[[PlannedUnit], nn.Module]
"""Lets calls of a planned unit's module reach the unit; returns the module that users call."""


@contextmanager
def collection_paused() -> Iterator[None]:
    """Disable the garbage collector in the context: construction makes many objects that all stay, so collecting is useless."""
    paused = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if paused:
            gc.enable()


@collection_paused()
def attach(
    module: nn.Module,
    options: Mapping[str, Any],
    connect: Connect,
    *,
    policy: Any = None,
    ignored: Ignored,
    composable: bool = False,
) -> list[Unit]:
    """Make ``module``, and what ``policy`` chooses below it, units; return them, that of ``module`` last.

    Args:
        module: What the API was called on.
        options: Keyword arguments of its unit (see ``resolve.UnitOptions``), which a policy may override per module.
        connect: Lets calls reach a unit.
        policy: Chooses the units below; None for no units.
        ignored: What to leave alone.
        composable: Existing units below are kept beside the policy's choice.

    Raises:
        FsdpError: A refused call; the module is as it was.

    Collectives:
        With ``sync_module_states`` broadcasts; hybrid strategies without groups make groups. All ranks must call.
    """
    keep_compiler_out()
    # A unit knows what those below it ignore, so the nearest ones suffice.
    nearest = [unit_of(below) for _, below in walk(module, has_its_own)]
    ignored = ignored.union(unit.ignored for unit in nearest if unit is not None)
    targets = choose_targets(module, policy, options, ignored, may_hold_units=composable)
    plan = make_plan(module, targets, options, ignored)
    if targets.by_object:
        check_frozen(plan, use_orig_params=bool(options["use_orig_params"]))
    resolved = resolve_units(plan, automatic=policy is not None, composable=composable)
    params = materialize_units(resolved, ignored)
    return [_make(each, params[each.planned.module], connect, ignored) for each in resolved[::-1]]


def _make(unit: ResolvedUnit, params: Sequence[ManagedParam], connect: Connect, ignored: Ignored) -> Unit:
    """Move, broadcast and flatten one unit: the memory of its full parameters is free before the next one begins."""
    planned, config = unit.planned, unit.config
    params = [each.flattened(unit.extensions[each.fqn]) if each.fqn in unit.extensions else each for each in params]
    if unit.moves:
        move_states(planned, config.device, ignored)
    if unit.broadcasts:
        broadcast_states(params, planned.modules, config)
    handle = FlatHandle(params, planned.module, config, planned.fqn)
    called = connect(planned)
    made = Unit(planned.module, called, handle, config, planned.modules, ignored)
    set_unit(called, made)
    for finish in (*UNIT_MADE, *UNIT_WATCHES):
        finish(made)
    return made
