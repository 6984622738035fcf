"""Wraps a model with an implementation that has the arguments of torch's FSDP class.

torch's own and the reference take the same arguments, each as objects of its own classes; `FsdpNames` finds them under
the names that both have.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn

from fsdp_testing.adapters.protocol import Precision, Setup, WrapPolicy
from fsdp_testing.adapters.shared.checkpointing import checkpoint_modules, innermost_first, replace_module
from fsdp_testing.base import env

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
        ignored, once = [module.get_submodule(name) for name in setup.ignored], "ignored_by_units" in setup.settings
        # Read once, when a model is wrapped.
        precise = {"FSDP_USE_FULL_PREC_IN_EVAL": "1"} if "precise_evaluation" in setup.settings else {}
        with warnings.catch_warnings(), env.temporary(precise):
            # Deprecated, but documented and judged: NO_SHARD over several ranks; torch's class itself since 2.13.
            warnings.simplefilter("ignore", FutureWarning)
            for name, unit in innermost_first(module, setup.units):
                inside = {id(inner) for inner in unit.modules()}
                wrapped = apply(unit, setup, name, self.options(setup, name, [m for m in ignored if id(m) in inside]))
                ignored = [m for m in ignored if not once or id(m) not in inside]
                if wrapped is not unit:
                    replace_module(module, unit, wrapped)
            options = self.options(setup, "", ignored)
            if setup.policy is not None:
                options["auto_wrap_policy"] = self._policy(module, setup.policy)
            return apply(module, setup, "", options)

    def options(self, setup: Setup, name: str, ignored: list[nn.Module]) -> dict[str, Any]:
        """Return the arguments that the case sets for the unit `name`; all others keep their defaults."""
        strategy = setup.unit_strategies.get(name, setup.strategy)
        precision = setup.unit_precisions.get(name, setup.precision)
        if setup.compressed_to is not None:
            precision = replace(precision, reduce_dtype=None)
        prefetch = _PREFETCH.get(setup.backward_prefetch)
        asked = self._ranks(setup, strategy) | {
            "mixed_precision": self._precision(precision) if precision != Precision() else None,
            "cpu_offload": self.api.CPUOffload(offload_params=True) if setup.cpu_offload else None,
            "sync_module_states": setup.sync_module_states,
            "param_init_fn": setup.init_module,
            **self._ignored(setup, ignored),
            "forward_prefetch": setup.forward_prefetch,
        }
        chosen = {option: value for option, value in asked.items() if value not in (None, False)}
        if setup.backward_prefetch != "pre":
            chosen["backward_prefetch"] = None if prefetch is None else self.api.BackwardPrefetch[prefetch]
        # On a machine with an accelerator the default is to compute there, even if the world's device is the CPU.
        return chosen | {"device_id": setup.device}

    @staticmethod
    def _ignored(setup: Setup, modules: list[nn.Module]) -> dict[str, Any]:
        if "ignored_by_parameter" in setup.settings and modules:
            return {"ignored_states": {parameter for module in modules for parameter in module.parameters()}}
        return {"ignored_modules": modules or None}

    @staticmethod
    def _ranks(setup: Setup, strategy: str) -> dict[str, Any]:
        """Return the ranks of a unit: a mesh for two axes, else a group; the other of the two if the case says so."""
        is_hybrid, mesh = strategy.startswith("hybrid"), setup.mesh
        if "mesh_for_group" in setup.settings and mesh is not None:
            if not is_hybrid:
                return {"device_mesh": mesh}
            replicate, shard = mesh.get_all_groups()
            return {"process_group": (shard, replicate)}
        if is_hybrid or setup.tensor_mesh is not None:
            return {"device_mesh": mesh}
        return {"process_group": None if setup.group is dist.group.WORLD else setup.group}

    def strategy(self, setup: Setup, name: str, option: str) -> dict[str, Any]:
        """Return the strategy of the unit `name` as the argument `option`; nothing if it is the default."""
        strategy = setup.unit_strategies.get(name, setup.strategy)
        return {} if strategy == "full_shard" else {option: self.api.ShardingStrategy[STRATEGIES[strategy]]}

    def _policy(self, module: nn.Module, policy: WrapPolicy) -> Any:
        if policy.classes:
            return self.wrapping.ModuleWrapPolicy(set(policy.classes))
        if policy.min_numel is not None:
            return partial(self.wrapping.size_based_auto_wrap_policy, min_num_params=policy.min_numel)
        chosen = {id(module.get_submodule(name)) for name in policy.names}
        return self.wrapping.CustomPolicy(lambda candidate: id(candidate) in chosen)

    def _precision(self, precision: Precision) -> Any:
        asked = {
            "param_dtype": precision.param_dtype,
            "reduce_dtype": precision.reduce_dtype,
            "buffer_dtype": precision.buffer_dtype,
            "cast_forward_inputs": precision.cast_unit_inputs,
            "keep_low_precision_grads": precision.low_gradients,
        }
        chosen: dict[str, Any] = {option: value for option, value in asked.items() if value not in (None, False)}
        if not precision.cast_root_inputs:
            chosen["cast_root_forward_inputs"] = False
        return self.api.MixedPrecision(**chosen)
