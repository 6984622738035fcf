"""How do planned units become real ones?

The one path behind the wrapper and the composable API. A builder is told how a module becomes a holder of its unit
(wrapped, or hooked); everything else is the same: decide what is ignored and who owns what, materialize, move,
broadcast, flatten children first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_ref.annotations import set_unit, units_under
from fsdp_ref.build.ignored import Ignored, resolve_ignored
from fsdp_ref.build.materialize import broadcast_states, compute_device, materialize, move_states
from fsdp_ref.build.plan import PlannedUnit, WrapPlan, check_frozen, make_plan
from fsdp_ref.build.targets import choose_targets
from fsdp_ref.comm.groups import DataParallelGroups, effective_strategy, resolve_groups
from fsdp_ref.config import (
    BackwardPrefetch,
    MixedPrecision,
    ShardingStrategy,
    coerce_backward_prefetch,
    coerce_cpu_offload,
    coerce_mixed_precision,
    coerce_sharding_strategy,
)
from fsdp_ref.env import read_switches
from fsdp_ref.errors import ConfigError, FsdpRuntimeError, listing
from fsdp_ref.handle.flat_handle import FlatHandle
from fsdp_ref.handle.flatten import HandleConfig
from fsdp_ref.naming import clean_tensor_name
from fsdp_ref.runtime.unit import Unit, UnitConfig
from fsdp_ref.storage.param_sites import ManagedParam
from fsdp_ref.storage.views import is_flattened


@dataclass(slots=True)
class UnitOptions:
    """Keyword arguments of one unit as users (or a policy) gave them; names are those of the wrapper."""

    process_group: Any = None
    sharding_strategy: Any = None
    cpu_offload: Any = None
    backward_prefetch: Any = BackwardPrefetch.BACKWARD_PRE
    mixed_precision: Any = None
    param_init_fn: Any = None
    device_id: Any = None
    sync_module_states: bool = False
    forward_prefetch: bool = False
    limit_all_gathers: bool = True
    use_orig_params: bool = False
    device_mesh: DeviceMesh | None = None

    @classmethod
    def of(cls, options: dict[str, Any]) -> UnitOptions:
        """Read keyword arguments.

        Raises:
            ConfigError: a name that is none of a unit's options.
        """
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(options) - known)
        if unknown:
            raise ConfigError(
                f"options of a unit: expected some of {listing(sorted(known))}, got {listing(unknown)}. Correct the policy."
            )
        return cls(**options)

    def as_dict(self) -> dict[str, Any]:
        """Return the options as keyword arguments, which a policy may override per module."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(slots=True)
class Application:
    """One call of an API on a module.

    Attributes:
        module: the module it is applied to.
        options: its unit's options.
        policy: what becomes units below, None for nothing.
        ignored_modules: modules to leave alone.
        ignored_states: modules or parameters to leave alone.
        hold: makes a holder for a unit: given the planned unit, returns the module that users call.
        may_hold_units: units already below are kept beside what the policy chooses.
        composable: inputs are cast where the API was applied.
    """

    module: nn.Module
    options: UnitOptions
    hold: Callable[[PlannedUnit], nn.Module]
    policy: Any = None
    ignored_modules: Iterable[nn.Module] | None = None
    ignored_states: Any = None
    may_hold_units: bool = False
    composable: bool = False


def attach(application: Application) -> Unit:
    """Make the units of one application; return that of the module it was applied to.

    Collectives:
        With ``sync_module_states`` broadcasts; hybrid strategies without groups make groups. All ranks must call.
    """
    module, options = application.module, application.options
    ignored = resolve_ignored(module, application.ignored_modules, application.ignored_states).union(
        unit.ignored for _, _, unit in units_under(module)
    )
    strategy = coerce_sharding_strategy(options.sharding_strategy) or ShardingStrategy.FULL_SHARD
    policy = application.policy
    groups = resolve_groups(options.process_group, options.device_mesh, strategy, automatic=policy is not None)
    if groups.replicate is not None and options.process_group is None and options.device_mesh is None:
        # Made here once; every unit below uses the same pair.
        options.process_group = (groups.shard, groups.replicate)
    precision = None if options.mixed_precision is None else coerce_mixed_precision(options.mixed_precision)
    kwargs = options.as_dict()
    targets = choose_targets(
        module, policy, kwargs, ignored, mixed_precision=precision, may_hold_units=application.may_hold_units
    )
    held_by = functools.partial(_held_by, module)
    plan = make_plan(module, targets, kwargs, ignored, is_managed=is_flattened, held_by=held_by)
    if targets.by_object:
        check_frozen(plan, use_orig_params=options.use_orig_params)
    parsed = {planned.module: UnitOptions.of(planned.options) for planned in plan.units}
    for planned in plan.units:
        _prepare(planned, parsed[planned.module], plan.ignored)
    units = {planned.module: _make(planned, parsed[planned.module], application, plan) for planned in plan.init_order()}
    root = units[module]
    if application.composable:
        root.mark_applied()
    if not options.use_orig_params:
        _refuse_unflattened(module, plan.ignored)
    return root


def _held_by(module: nn.Module, param: nn.Parameter) -> str:
    """Name the unit below ``module`` that holds ``param``, and what it calls it."""
    for name, _, unit in units_under(module):
        if unit.handle is not None:
            for original, fqn in zip(unit.handle.originals.params, unit.handle.fqns):
                if original is param:
                    return f"{fqn} of unit {clean_tensor_name(name)!r}, which was made before"
    return "a unit that was made before"


def _groups_of(options: UnitOptions, *, automatic: bool = False) -> tuple[DataParallelGroups, ShardingStrategy]:
    strategy = coerce_sharding_strategy(options.sharding_strategy) or ShardingStrategy.FULL_SHARD
    groups = resolve_groups(options.process_group, options.device_mesh, strategy, automatic=automatic)
    return groups, strategy


def _prepare(planned: PlannedUnit, options: UnitOptions, ignored: Ignored) -> None:
    """Materialize and move, before any flattening."""
    groups, _ = _groups_of(options)
    device = compute_device(options.device_id, (p.param for p in planned.params), groups)
    materialize(planned, options.param_init_fn, device, ignored)
    if options.device_id is not None:
        move_states(planned, device, ignored)


def _make(planned: PlannedUnit, options: UnitOptions, application: Application, plan: WrapPlan) -> Unit:
    """Build one unit: broadcast, flatten, attach."""
    groups, asked = _groups_of(options)
    strategy = effective_strategy(asked, groups)
    # Materializing may have put new parameter objects on the modules.
    params = [
        ManagedParam.of(
            _param_at(site.sites[0].module, site.sites[0].name), [(s.module, s.name, s.fqn) for s in site.sites]
        )
        for site in planned.params
    ]
    config = UnitConfig(
        strategy=strategy,
        device=compute_device(options.device_id, (managed.param for managed in params), groups),
        mixed_precision=MixedPrecision() if planned.full_precision else coerce_mixed_precision(options.mixed_precision),
        cpu_offload=coerce_cpu_offload(options.cpu_offload),
        backward_prefetch=coerce_backward_prefetch(options.backward_prefetch),
        forward_prefetch=bool(options.forward_prefetch),
        limit_all_gathers=bool(options.limit_all_gathers),
        use_orig_params=bool(options.use_orig_params),
        full_precision_module=planned.full_precision,
        switches=read_switches(),
    )
    if options.sync_module_states:
        broadcast_states([managed.param for managed in params], planned.modules, groups, config.device)
    handle = None
    if params:
        decided = HandleConfig(
            strategy=strategy,
            device=config.device,
            mixed_precision=config.mixed_precision,
            offload=config.cpu_offload.offload_params,
            use_orig_params=config.use_orig_params,
            switches=config.switches,
        )
        handle = FlatHandle(params, planned.module, decided, groups, planned.fqn)
    holder = application.hold(planned)
    unit = Unit(planned.module, holder, handle, config, groups, planned.modules)
    unit.ignored = plan.ignored
    set_unit(holder, unit)
    return unit


def _param_at(module: nn.Module, name: str) -> nn.Parameter:
    param = module._parameters[name]
    assert param is not None  # the plan lists existing parameters only
    return param


def _refuse_unflattened(module: nn.Module, ignored: Ignored) -> None:
    """Check that nothing was forgotten.

    Raises:
        FsdpRuntimeError: a parameter that is neither ignored nor flattened.
    """
    left = [
        name for name, param in module.named_parameters() if not is_flattened(param) and param not in ignored.params
    ]
    if left:
        raise FsdpRuntimeError(
            f"Found an unflattened parameter: expected every parameter to be flattened or ignored, got {listing(left)}. "
            "This is a defect of fsdp_ref; please report it."
        )
