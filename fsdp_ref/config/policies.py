"""Settings that users hand over as objects: frozen dataclasses with torch's field names and defaults.

Source: ``torch.distributed.fsdp.api`` for names and defaults. The objects are what was asked for; what follows from
it for one flat parameter (is precision really mixed, in which dtype is reduced) is decided where dtypes are known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsdp_ref.compat import BatchNormBase
from fsdp_ref.errors import ConfigError, explain

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fsdp_ref.config.enums import StateDictType


@dataclass(frozen=True, init=False, slots=True)
class MixedPrecision:
    """Dtypes of computation, reduction and buffers.

    Attributes:
        param_dtype: dtype of parameters in forward and backward; None keeps the original.
        reduce_dtype: dtype of gradient reduction; None follows ``param_dtype``.
        buffer_dtype: dtype that floating-point buffers are cast to once, at first use; None keeps the original.
        keep_low_precision_grads: leave reduced gradients in the reduction dtype instead of the parameters' own.
            ``keep_grads_in_reduce_dtype`` is a second spelling of it, as argument and as property.
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
                explain(
                    "MixedPrecision",
                    expected="keep_low_precision_grads and keep_grads_in_reduce_dtype to agree",
                    got="True and False",
                    remedy="Pass one of the two; they spell the same option",
                )
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
        """The same flag as ``keep_low_precision_grads``, under the name that says what it does."""
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
    """Options of sharded state dicts: ``_use_dtensor`` is there for torch's signature; entries are DTensors always."""

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
    """Options of local optimizer state dicts; they stay where they are by default."""

    offload_to_cpu: bool = False


@dataclass(frozen=True, slots=True)
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """Options of sharded optimizer state dicts: ``_use_dtensor`` is there for torch's signature; entries are DTensors always."""

    _use_dtensor: bool = False


@dataclass(frozen=True, slots=True)
class StateDictSettings:
    """The state-dict type of a module tree together with the options of its model and optimizer state dicts."""

    state_dict_type: StateDictType
    state_dict_config: StateDictConfig
    optim_state_dict_config: OptimStateDictConfig
