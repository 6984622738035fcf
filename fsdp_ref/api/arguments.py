"""The arguments that ``fully_shard`` has in torch since 2.6, in the words of the rest of the package.

Policies are taken from torch as well as from here: they are recognised by class name and fields, so nothing of torch's is
imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fsdp_ref.config import CPUOffload, MixedPrecision, ShardingStrategy, coerce_config
from fsdp_ref.errors import ConfigError, ConfigTypeError, UnsupportedError, listing

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of computation and reduction.

    Attributes:
        param_dtype: dtype of full parameters and of computation; None: the parameters' dtype.
        reduce_dtype: dtype of the reduction of gradients; None: ``param_dtype``.
        output_dtype: dtype that floating-point outputs of each unit are cast to; None leaves them.
        cast_forward_inputs: each unit casts its floating-point inputs to ``param_dtype``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True)
class OffloadPolicy:
    """Parameters stay on their device."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Parameters, gradients and optimizer state live on the CPU, in pinned memory where the device has that."""

    pin_memory: bool = True


def older_arguments(
    mesh: Any,
    reshard_after_forward: object,
    mp_policy: object,
    offload_policy: object,
    ignored_params: Iterable[nn.Parameter] | None,
    older: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the older arguments (``device_mesh``, ``sharding_strategy``, ...) with what the newer ones say.

    Args:
        mesh: A mesh of one axis, or of two (replicate, shard).
        reshard_after_forward: Whether full parameters are freed between forward and backward; None: yes. The outermost unit
            keeps them whatever is said, since its backward comes first.
        mp_policy: A :class:`MixedPrecisionPolicy`.
        offload_policy: A :class:`CPUOffloadPolicy` or :class:`OffloadPolicy`.
        ignored_params: Parameters to leave alone.
        older: The older arguments as they were given, None for those that were not.

    Raises:
        ConfigError: A newer argument beside the older one for the same thing; lists all.
        ConfigTypeError: An object of another kind.
        UnsupportedError: ``reshard_after_forward`` as a number of ranks.
    """
    pairs = {
        "mesh": (mesh, ("device_mesh", "process_group")),
        "reshard_after_forward": (reshard_after_forward, ("strategy",)),
        "mp_policy": (mp_policy, ("mixed_precision",)),
        "offload_policy": (offload_policy, ("cpu_offload",)),
        "ignored_params": (ignored_params, ("ignored_modules",)),
    }
    both = [
        f"{name} and {other}"
        for name, (value, others) in pairs.items()
        for other in others
        if value is not None and older[other] is not None
    ]
    if both:
        raise ConfigError(
            f"fully_shard: expected one argument for each setting, got {listing(both)}. Pass the first of each pair."
        )
    merged = dict(older)
    if mesh is not None:
        merged["device_mesh"] = mesh
    if mesh is not None or reshard_after_forward is not None:
        merged["strategy"] = _strategy(merged["device_mesh"], reshard_after_forward, older["strategy"])
    if mp_policy is not None:
        policy = coerce_config(MixedPrecisionPolicy, mp_policy, where="mp_policy")
        casts = policy.cast_forward_inputs
        merged["mixed_precision"] = MixedPrecision(
            policy.param_dtype, policy.reduce_dtype, cast_forward_inputs=casts, cast_root_forward_inputs=casts
        )
        merged["output_dtype"] = policy.output_dtype
    if offload_policy is not None:
        merged["cpu_offload"] = CPUOffload(_offloads(offload_policy))
    merged["sharding_strategy"] = merged.pop("strategy")
    return merged


def _strategy(mesh: Any, reshards: object, strategy: Any) -> Any:
    if reshards is not None and not isinstance(reshards, bool):
        raise UnsupportedError(
            f"fully_shard: reshard_after_forward: expected True, False or None, got {reshards!r}. Pass True; a smaller "
            "group after forward is not supported."
        )
    if strategy is not None:
        return strategy
    hybrid = mesh is not None and mesh.ndim == 2
    if reshards is False:
        return ShardingStrategy._HYBRID_SHARD_ZERO2 if hybrid else ShardingStrategy.SHARD_GRAD_OP
    return ShardingStrategy.HYBRID_SHARD if hybrid else ShardingStrategy.FULL_SHARD


def _offloads(policy: object) -> bool:
    names = {cls.__name__ for cls in type(policy).__mro__}
    if "OffloadPolicy" not in names:
        raise ConfigTypeError(
            f"offload_policy: expected a CPUOffloadPolicy or an OffloadPolicy, got {policy!r} of type "
            f"{type(policy).__name__}. Pass fsdp_ref.CPUOffloadPolicy() or torch's object of that name."
        )
    return "CPUOffloadPolicy" in names
