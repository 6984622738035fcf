"""Settings of the reference: enums and frozen option objects, ours and (by name) torch's.

Names, member order, fields and defaults are those of ``torch.distributed.fsdp.api`` (re-read for torch 2.11 to 2.13). Users mix
imports, so ``coerce_*`` turns either library's object into ours, without importing torch's FSDP. The objects hold the user's
request; its meaning for one flat parameter (whether precision is really mixed, the reduction dtype) is decided where dtypes are
known.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Final, TypeVar

from fsdp_ref.compat import BatchNormBase
from fsdp_ref.errors import ConfigError, ConfigTypeError, listing

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fsdp_ref.comm.groups import DataParallelGroups

E = TypeVar("E", bound=Enum)
C = TypeVar("C")

# ---------------------------------------------------------------------- choices


class ShardingStrategy(Enum):
    """What is sharded and when full parameters are freed.

    ``FULL_SHARD``: parameters, gradients and optimizer state are sharded; full parameters are freed after forward.
    ``SHARD_GRAD_OP``: as above, and full parameters stay from forward until after backward.
    ``NO_SHARD``: everything is replicated; gradients are averaged by an all-reduce.
    ``HYBRID_SHARD``: ``FULL_SHARD`` inside a shard group, replicated across a replicate group.
    ``_HYBRID_SHARD_ZERO2``: ``SHARD_GRAD_OP`` inside a shard group, replicated across a replicate group.
    """

    FULL_SHARD = auto()
    SHARD_GRAD_OP = auto()
    NO_SHARD = auto()
    HYBRID_SHARD = auto()
    _HYBRID_SHARD_ZERO2 = auto()


class BackwardPrefetch(Enum):
    """When the next unit's parameters are gathered in backward: before or after the current unit's gradients."""

    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()


class StateDictType(Enum):
    """Which form ``state_dict`` returns: whole tensors, this rank's flat shards, or sharded original tensors."""

    FULL_STATE_DICT = auto()
    LOCAL_STATE_DICT = auto()
    SHARDED_STATE_DICT = auto()


class OptimStateKeyType(Enum):
    """How optimizer state is keyed: by parameter name or by integer parameter id."""

    PARAM_NAME = auto()
    PARAM_ID = auto()


HYBRID_SHARDING_STRATEGIES: Final = frozenset({ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2})
NO_RESHARD_AFTER_FORWARD_STRATEGIES: Final = frozenset(
    {ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2}
)

# ---------------------------------------------------------------------- what users hand over as objects


@dataclass(frozen=True, init=False, slots=True)
class MixedPrecision:
    """Dtypes of computation, reduction and buffers.

    Attributes:
        param_dtype: dtype of parameters in forward and backward; None keeps the original.
        reduce_dtype: dtype of gradient reduction; None follows ``param_dtype``.
        buffer_dtype: dtype that floating-point buffers are cast to once, at first use; None keeps the original.
        keep_low_precision_grads: leave reduced gradients in the reduction dtype instead of the parameters' own.
            ``keep_grads_in_reduce_dtype`` is a second name for it, as argument and as property.
        cast_forward_inputs: every unit with this policy casts its own floating-point inputs to ``param_dtype``.
        cast_root_forward_inputs: the root casts its inputs; overrides ``cast_forward_inputs`` there.
        _module_classes_to_ignore: module classes that automatic wrapping gives full-precision units of their own.
    """

    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    buffer_dtype: torch.dtype | None
    keep_low_precision_grads: bool
    cast_forward_inputs: bool
    cast_root_forward_inputs: bool
    _module_classes_to_ignore: tuple[type[nn.Module], ...]

    def __init__(
        self,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        buffer_dtype: torch.dtype | None = None,
        keep_low_precision_grads: bool = False,
        cast_forward_inputs: bool = False,
        cast_root_forward_inputs: bool = True,
        _module_classes_to_ignore: tuple[type[nn.Module], ...] = (BatchNormBase,),
        *,
        keep_grads_in_reduce_dtype: bool | None = None,
    ) -> None:
        """Set the fields; written by hand because two arguments spell one field.

        Raises:
            ConfigError: the two spellings of ``keep_low_precision_grads`` disagree.
        """
        if keep_low_precision_grads and keep_grads_in_reduce_dtype is False:
            raise ConfigError(
                "MixedPrecision: expected keep_low_precision_grads and keep_grads_in_reduce_dtype to agree, got True "
                "and False. Pass one of the two; they spell the same option."
            )
        values: dict[str, object] = {
            "param_dtype": param_dtype,
            "reduce_dtype": reduce_dtype,
            "buffer_dtype": buffer_dtype,
            "keep_low_precision_grads": bool(keep_low_precision_grads or keep_grads_in_reduce_dtype),
            "cast_forward_inputs": cast_forward_inputs,
            "cast_root_forward_inputs": cast_root_forward_inputs,
            "_module_classes_to_ignore": tuple(_module_classes_to_ignore or ()),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def keep_grads_in_reduce_dtype(self) -> bool:
        """The same flag as ``keep_low_precision_grads``, with a clearer name."""
        return self.keep_low_precision_grads


@dataclass(frozen=True, slots=True)
class CPUOffload:
    """Where shards live outside computation: ``offload_params=True`` keeps parameters and gradients on the CPU."""

    offload_params: bool = False


@dataclass(frozen=True, slots=True)
class StateDictConfig:
    """Options common to all model state dicts: ``offload_to_cpu`` returns values on the CPU."""

    offload_to_cpu: bool = False


@dataclass(frozen=True, slots=True)
class FullStateDictConfig(StateDictConfig):
    """Options of full state dicts: ``rank0_only`` returns values on rank 0 and nothing elsewhere."""

    rank0_only: bool = False


@dataclass(frozen=True, slots=True)
class LocalStateDictConfig(StateDictConfig):
    """Options of local (flat, this rank's) state dicts."""


@dataclass(frozen=True, slots=True)
class ShardedStateDictConfig(StateDictConfig):
    """Options of sharded state dicts: entries are always DTensors (``_use_dtensor`` is torch's)."""

    _use_dtensor: bool = False


@dataclass(frozen=True, slots=True)
class OptimStateDictConfig:
    """Options common to all optimizer state dicts; values are returned on the CPU by default."""

    offload_to_cpu: bool = True


@dataclass(frozen=True, slots=True)
class FullOptimStateDictConfig(OptimStateDictConfig):
    """Options of full optimizer state dicts: ``rank0_only`` returns values on rank 0 and nothing elsewhere."""

    rank0_only: bool = False


@dataclass(frozen=True, slots=True)
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """Options of local optimizer state dicts; values stay on their device by default."""

    offload_to_cpu: bool = False


@dataclass(frozen=True, slots=True)
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """Options of sharded optimizer state dicts: entries are always DTensors (``_use_dtensor`` is torch's)."""

    _use_dtensor: bool = False


@dataclass(frozen=True, slots=True)
class StateDictSettings:
    """The state-dict type of a module tree together with the options of its model and optimizer state dicts."""

    state_dict_type: StateDictType = StateDictType.FULL_STATE_DICT
    state_dict_config: StateDictConfig = FullStateDictConfig()
    optim_state_dict_config: OptimStateDictConfig = FullOptimStateDictConfig()


# ---------------------------------------------------------------------- torch's objects become ours


def coerce_enum(cls: type[E], value: object, *, where: str) -> E:
    """Return ``value`` as a member of our enum ``cls``.

    Args:
        cls: one of the enums of this package.
        value: a member of ``cls``, or of another enum with the same class name and a member of the same name.
        where: the argument's name, for the message.

    Raises:
        ConfigTypeError: ``value`` is neither.
    """
    if isinstance(value, cls):
        return value
    if isinstance(value, Enum) and type(value).__name__ == cls.__name__ and value.name in cls.__members__:
        return cls[value.name]
    raise ConfigTypeError(
        f"{where}: expected a member of {cls.__name__} ({listing(cls.__members__)}), got {value!r} of type "
        f"{type(value).__name__}. Pass a member of fsdp_ref.{cls.__name__}."
    )


def coerce_config(cls: type[C], value: object, *, where: str) -> C:
    """Return ``value`` as an object of our dataclass ``cls`` (one of its subclasses passes unchanged).

    Raises:
        ConfigTypeError: ``value`` is neither ours nor a dataclass object of the same class name, or it carries an
            option that is not known here and is not at its default.
    """
    if isinstance(value, cls):
        return value
    if isinstance(value, type) or not dataclasses.is_dataclass(value) or type(value).__name__ != cls.__name__:
        raise ConfigTypeError(
            f"{where}: expected a {cls.__name__}, got {value!r} of type {type(value).__name__}. Pass "
            f"fsdp_ref.{cls.__name__}(...) or torch's object of that name."
        )
    known = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]  # C is a dataclass
    given = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    unknown = sorted(
        field.name
        for field in dataclasses.fields(value)
        if field.name not in known and given[field.name] != _default_of(field)
    )
    if unknown:
        raise ConfigTypeError(
            f"{where}: expected only the options {listing(sorted(known))}, got also {listing(unknown)}. Leave them at "
            "their defaults; this version does not know them."
        )
    return cls(**{name: given[name] for name in given if name in known})


def _default_of(field: dataclasses.Field[object]) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def coerce_sharding_strategy(value: object) -> ShardingStrategy | None:
    """Return the strategy as ours; None stays None ("not chosen", which means FULL_SHARD)."""
    return None if value is None else coerce_enum(ShardingStrategy, value, where="sharding_strategy")


def coerce_backward_prefetch(value: object) -> BackwardPrefetch | None:
    """Return the prefetch choice as ours; None stays None ("do not prefetch")."""
    return None if value is None else coerce_enum(BackwardPrefetch, value, where="backward_prefetch")


def coerce_mixed_precision(value: object) -> MixedPrecision:
    """Return the precision policy as ours; None is the policy that changes nothing."""
    return MixedPrecision() if value is None else coerce_config(MixedPrecision, value, where="mixed_precision")


def coerce_cpu_offload(value: object) -> CPUOffload:
    """Return the offload policy as ours; None is no offload."""
    return CPUOffload() if value is None else coerce_config(CPUOffload, value, where="cpu_offload")


# ---------------------------------------------------------------------- what a unit is made with


@dataclass(frozen=True, slots=True)
class UnitConfig:
    """Settings of one unit.

    Attributes:
        strategy: the strategy that the groups allow.
        device: where the unit computes.
        groups: over which ranks it is sharded and replicated.
        mixed_precision: dtypes.
        cpu_offload: where shards live.
        backward_prefetch: when backward gathers the next unit; None: never ahead.
        forward_prefetch: gather the next unit in forward ahead of need, in the order of the first iteration.
        limit_all_gathers: bound how far the host runs ahead of the device.
        use_orig_params: users see their own parameters and not the flat one.
        output_dtype: floating-point outputs are cast to it; None leaves them.
        full_precision_module: made because mixed precision leaves its class alone: inputs are cast up, outputs back.
        applied_here: the composable API was called on this very module, so that its inputs are cast like a root's.
        full_precision_in_eval: modules in eval mode compute in full precision.
        reshards_after_forward: whether the strategy frees full parameters between forward and backward; derived.
    """

    strategy: ShardingStrategy
    device: torch.device
    groups: DataParallelGroups
    mixed_precision: MixedPrecision = field(default_factory=MixedPrecision)
    cpu_offload: CPUOffload = field(default_factory=CPUOffload)
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    forward_prefetch: bool = False
    limit_all_gathers: bool = True
    use_orig_params: bool = False
    output_dtype: torch.dtype | None = None
    full_precision_module: bool = False
    applied_here: bool = False
    full_precision_in_eval: bool = False
    reshards_after_forward: bool = field(init=False)

    def __post_init__(self) -> None:
        keeps = self.strategy in NO_RESHARD_AFTER_FORWARD_STRATEGIES or self.strategy is ShardingStrategy.NO_SHARD
        object.__setattr__(self, "reshards_after_forward", not keeps)

    @property
    def hybrid(self) -> bool:
        """Whether gradients are reduced over a second group."""
        return self.strategy in HYBRID_SHARDING_STRATEGIES

    @property
    def offload(self) -> bool:
        """Whether shards and their gradients live on the CPU."""
        return self.cpu_offload.offload_params
