"""How is a model wrapped by an implementation that has the arguments of torch's FSDP class?

torch's own and the reference take the same arguments, each as objects of its own classes; `FsdpNames` finds them under
the names that both have.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from fsdp_testing.implementations.protocol import Precision, Setup, WrapPolicy
from fsdp_testing.implementations.shared.checkpointing import checkpoint_modules
from fsdp_testing.implementations.shared.sites import innermost_first, replace_module

STRATEGIES = {
    "full_shard": "FULL_SHARD",
    "shard_grad_op": "SHARD_GRAD_OP",
    "no_shard": "NO_SHARD",
    "hybrid_shard": "HYBRID_SHARD",
    "hybrid_shard_zero2": "_HYBRID_SHARD_ZERO2",
}
_PREFETCH = {"pre": "BACKWARD_PRE", "post": "BACKWARD_POST"}

#: `(module, setup, original FQN, options) -> what stands in its place`.
Apply = Callable[[nn.Module, Setup, str, dict[str, Any]], nn.Module]


@dataclass(frozen=True, slots=True)
class FsdpNames:
    """One implementation's classes.

    Attributes:
        api: The module with `ShardingStrategy`, `BackwardPrefetch`, `MixedPrecision` and `CPUOffload`.
        wrapping: The module with its wrap policies.
    """

    api: Any
    wrapping: Any

    def wrap(self, module: nn.Module, setup: Setup, apply: Apply) -> nn.Module:
        """Apply the implementation to every unit, children first, and then to the root.

        Collectives: those of `apply`; every rank calls.
        """
        checkpoint_modules(module, setup.checkpointed, reentrant=setup.checkpoint_reentrant)
        ignored = [module.get_submodule(name) for name in setup.ignored]
        with warnings.catch_warnings():
            # Deprecated, but documented and judged: NO_SHARD over several ranks; torch's class itself since 2.13.
            warnings.simplefilter("ignore", FutureWarning)
            for name, unit in innermost_first(module, setup.units):
                inside = {id(inner) for inner in unit.modules()}
                options = self.options(setup, name) | {"ignored_modules": [m for m in ignored if id(m) in inside]}
                wrapped = apply(unit, setup, name, options)
                if wrapped is not unit:
                    replace_module(module, unit, wrapped)
            if not setup.wrap_root:
                return module
            options = self.options(setup, "") | {"ignored_modules": ignored}
            if setup.policy is not None:
                options["auto_wrap_policy"] = self._policy(module, setup.policy)
            return apply(module, setup, "", options)

    def options(self, setup: Setup, name: str) -> dict[str, Any]:
        """Return the arguments for the unit `name`, but for strategy and backward prefetch."""
        on_mesh = setup.unit_strategies.get(name, setup.strategy).startswith("hybrid")
        return {
            "device_mesh": setup.mesh if on_mesh else None,
            "process_group": None if on_mesh else setup.group,
            "mixed_precision": self._precision(setup.unit_precisions.get(name, setup.precision)),
            "cpu_offload": self.api.CPUOffload(offload_params=True) if setup.cpu_offload else None,
            "sync_module_states": setup.sync_module_states,
            "forward_prefetch": setup.forward_prefetch,
            "device_id": setup.device,
        }

    def strategy(self, setup: Setup, name: str) -> Any:
        """Return the strategy of the unit `name`."""
        return self.api.ShardingStrategy[STRATEGIES[setup.unit_strategies.get(name, setup.strategy)]]

    def prefetch(self, setup: Setup) -> Any:
        """Return the backward prefetch; None for none."""
        name = _PREFETCH.get(setup.backward_prefetch)
        return None if name is None else self.api.BackwardPrefetch[name]

    def _policy(self, module: nn.Module, policy: WrapPolicy) -> Any:
        if policy.classes:
            return self.wrapping.ModuleWrapPolicy(set(policy.classes))
        if policy.min_numel is not None:
            return partial(self.wrapping.size_based_auto_wrap_policy, min_num_params=policy.min_numel)
        chosen = {id(module.get_submodule(name)) for name in policy.names}
        return self.wrapping.CustomPolicy(lambda candidate: id(candidate) in chosen)

    def _precision(self, precision: Precision) -> Any:
        if precision == Precision():
            return None
        return self.api.MixedPrecision(
            param_dtype=precision.param_dtype,
            reduce_dtype=precision.reduce_dtype,
            buffer_dtype=precision.buffer_dtype,
            keep_low_precision_grads=precision.keep_low_precision_grads,
            cast_forward_inputs=precision.cast_unit_inputs,
            cast_root_forward_inputs=precision.cast_inputs,
        )
