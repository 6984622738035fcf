"""The settings of each planned unit, and their checks.

All refusals happen here or before, so that a refused module is unchanged and the corrected call works. Options are read once
per unit; what outlives construction is one frozen ``UnitConfig``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist
from torch import nn

from fsdp_ref.build.device import compute_device, explicit_device
from fsdp_ref.build.materialize import check_broadcastable, check_initializable
from fsdp_ref.comm.groups import DataParallelGroups, default_group, effective_strategy, groups_by_host, resolve_groups
from fsdp_ref.comm.tensor_parallel import TensorParallel, is_dtensor, why_not
from fsdp_ref.config import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    UnitConfig,
    coerce_backward_prefetch,
    coerce_cpu_offload,
    coerce_mixed_precision,
    coerce_sharding_strategy,
)
from fsdp_ref.env import full_precision_in_eval
from fsdp_ref.errors import ConfigError, FlattenError, UnsupportedError, listing
from fsdp_ref.handle.flatten import check_params
from fsdp_ref.handle.param_hooks import is_hooked
from fsdp_ref.storage.extension import ParameterExtension, has_factories, registered_extension

if TYPE_CHECKING:
    import torch

    from fsdp_ref.build.ignored import Ignored
    from fsdp_ref.build.plan import PlannedUnit, WrapPlan


@dataclass(frozen=True, slots=True)
class UnitOptions:
    """Options of a unit that users and policies may set: keyword arguments of the wrapper, with its defaults.

    Read once; what outlives construction is the unit's ``UnitConfig``.
    """

    process_group: Any = None
    sharding_strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    cpu_offload: CPUOffload = CPUOffload()
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    mixed_precision: MixedPrecision = MixedPrecision()
    param_init_fn: Any = None
    device_id: Any = None
    sync_module_states: bool = False
    forward_prefetch: bool = False
    limit_all_gathers: bool = True
    use_orig_params: bool = False
    device_mesh: Any = None
    output_dtype: torch.dtype | None = None

    @classmethod
    def read(cls, given: Mapping[str, Any], *, full_precision: bool) -> UnitOptions:
        """Return options as ours.

        Raises:
            ConfigError: Options of other names.
            ConfigTypeError: Objects that are none of these.
        """
        unknown = sorted(set(given) - {field.name for field in fields(cls)})
        if unknown:
            raise ConfigError(
                f"options of a unit: expected some of {listing(sorted(field.name for field in fields(cls)))}, got "
                f"{listing(unknown)}. Correct the policy."
            )
        coerced = {name: read(given[name]) for name, read in _READERS.items() if name in given}
        flags = {name: bool(given[name]) for name in _FLAGS if name in given}
        options = cls(**{**given, **coerced, **flags})
        return replace(options, mixed_precision=MixedPrecision()) if full_precision else options


_READERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "sharding_strategy": lambda value: coerce_sharding_strategy(value) or ShardingStrategy.FULL_SHARD,
    "cpu_offload": coerce_cpu_offload,
    "backward_prefetch": coerce_backward_prefetch,
    "mixed_precision": coerce_mixed_precision,
}
_FLAGS: Final = ("sync_module_states", "forward_prefetch", "limit_all_gathers", "use_orig_params")


@dataclass(frozen=True, slots=True)
class ResolvedUnit:
    """A planned unit with its settings, and how it gets its first values.

    Attributes:
        planned: The module and its parameters.
        config: Settings for life.
        extensions: Those of its parameters that are more than a plain tensor, by name.
        init: Initializes modules that are on the meta device; None for their own way.
        moves: The unit's tensors are moved to its device.
        broadcasts: All ranks start from rank 0's values.
    """

    planned: PlannedUnit
    config: UnitConfig
    extensions: Mapping[str, ParameterExtension]
    init: Callable[[nn.Module], object] | None
    moves: bool
    broadcasts: bool


def resolve_units(plan: WrapPlan, *, automatic: bool, composable: bool) -> list[ResolvedUnit]:
    """Return the units of ``plan`` with their settings, in its order.

    Args:
        plan: Which units there are and what they own.
        automatic: A policy wraps, so missing hybrid groups may be made.
        composable: The composable API was called on the root of the plan.

    Raises:
        FsdpError: Options that cannot be read, contradict one another or do not fit the unit's parameters.

    Collectives:
        Hybrid strategies without groups make them after all checks: all ranks must call.
    """
    groups, devices = _Groups(automatic=automatic), _Devices()
    drafts: list[tuple[PlannedUnit, UnitOptions, torch.device]] = []
    for unit in plan.units:
        options = UnitOptions.read(unit.options, full_precision=unit.full_precision)
        drafts.append((unit, options, _check(unit, options, groups, devices[options.device_id], plan.ignored)))
    # Last, because a refused call could not undo the making of groups.
    final = [groups.final(options) for _, options, _ in drafts]
    extensions = [_extensions(unit, given) for (unit, _, _), (given, _) in zip(drafts, final)]
    axis = _tensor_axis([extension for found in extensions for extension in found.values()])
    return [
        ResolvedUnit(
            unit,
            UnitConfig(
                strategy,
                device,
                given if axis is None else replace(given, tensor=axis),
                options.mixed_precision,
                options.cpu_offload,
                options.backward_prefetch,
                options.forward_prefetch,
                options.limit_all_gathers,
                options.use_orig_params,
                output_dtype=options.output_dtype,
                full_precision_module=unit.full_precision,
                applied_here=composable and unit is plan.root,
                full_precision_in_eval=full_precision_in_eval(),
            ),
            found,
            options.param_init_fn,
            moves=options.device_id is not None,
            broadcasts=options.sync_module_states,
        )
        for (unit, options, device), (given, strategy), found in zip(drafts, final, extensions)
    ]


def _extensions(unit: PlannedUnit, groups: DataParallelGroups) -> dict[str, ParameterExtension]:
    # A DTensor that is a parameter is of its own type, whatever `nn.Parameter` was called with.
    params = {each.fqn: each.param for each in unit.params if has_factories() or type(each.param) is not nn.Parameter}
    found = {name: registered_extension(p, groups) or TensorParallel.of(p, groups) for name, p in params.items()}
    return {name: extension for name, extension in found.items() if extension is not None}


def _tensor_axis(extensions: Sequence[ParameterExtension]) -> dist.ProcessGroup | None:
    # torch may give two equal meshes groups of their own; one of them serves.
    found = [each.group for each in extensions if each.group is not None]
    axes = {tuple(dist.get_process_group_ranks(group)): group for group in reversed(found)}
    if len(axes) > 1:
        raise UnsupportedError(
            f"tensor parallelism: expected one axis for all parameters of a model, got {len(axes)}, over ranks "
            f"{listing(axes)}. Use one mesh for parallelize_module."
        )
    return found[0] if found else None


def _check(
    unit: PlannedUnit, options: UnitOptions, groups: _Groups, asked: torch.device | None, ignored: Ignored
) -> torch.device:
    """Refuse units that cannot be built; return the device of computation."""
    params, names = [planned.param for planned in unit.params], unit.fqns
    given, backend = groups.given(options)
    if params:
        check_params(params, names, use_orig_params=options.use_orig_params)
    check_initializable(unit, options.param_init_fn, ignored)
    offload = options.cpu_offload.offload_params
    device = compute_device(asked, params, needs_cuda=backend == "nccl", offload=offload)
    if options.sync_module_states and asked is None:
        check_broadcastable(unit, device)
    spread = {name: param for name, param in zip(names, params) if is_dtensor(param)}
    reasons = {name: why_not(param, given, device) for name, param in spread.items()}
    bad = [f"{name} {reason}" for name, reason in reasons.items() if reason is not None]
    hooked = [name for name, param in zip(names, params) if is_hooked(param)]
    bad += [
        f"{n} with hooks, expected none, which go with it (register them after sharding)" for n in hooked if n in spread
    ]
    if bad:
        raise FlattenError(
            f"unit {unit.fqn or 'root'!r}: expected DTensors of one tensor-parallel axis beside the unit's own, got "
            f"{listing(bad)}. Apply parallelize_module(module, mesh['tp'], plan) first, then shard over mesh['dp']."
        )
    if hooked and not options.use_orig_params:
        raise FlattenError(
            f"unit {unit.fqn or 'root'!r}: expected parameters without hooks, which never run once a flat parameter takes their "
            f"places, got hooks on {listing(hooked)}. Pass use_orig_params=True, or register hooks after sharding."
        )
    return device


class _Devices(dict[Any, "torch.device | None"]):
    """The devices that an application names; each is read once, with at most one warning."""

    def __getitem__(self, device_id: object) -> torch.device | None:
        key = repr(device_id)
        if key not in self:
            self[key] = explicit_device(device_id)
        return super().__getitem__(key)


class _Groups:
    """The groups of one application's units, resolved once for each different request."""

    def __init__(self, *, automatic: bool) -> None:
        self._automatic = automatic
        self._given: dict[Any, DataParallelGroups | None] = {}
        self._final: dict[Any, tuple[DataParallelGroups, ShardingStrategy]] = {}
        self._made: DataParallelGroups | None = None

    @staticmethod
    def _request(options: UnitOptions) -> tuple[int, int, ShardingStrategy]:
        return id(options.process_group), id(options.device_mesh), options.sharding_strategy

    def given(self, options: UnitOptions) -> tuple[DataParallelGroups | None, str]:
        """Read the given groups; return them and their backend, or the backend of groups that are still to be made."""
        key = self._request(options)
        if key not in self._given:
            self._given[key] = resolve_groups(
                options.process_group, options.device_mesh, key[-1], automatic=self._automatic
            )
        groups = self._given[key]
        return groups, dist.get_backend(default_group() if groups is None else groups.shard)

    def final(self, options: UnitOptions) -> tuple[DataParallelGroups, ShardingStrategy]:
        """Return the groups and the strategy that they allow, making groups on first need."""
        key = self._request(options)
        if key not in self._final:
            groups = self._given[key] or self._made
            if groups is None:
                groups = self._made = groups_by_host()
            self._final[key] = groups, effective_strategy(key[-1], groups)
        return self._final[key]
