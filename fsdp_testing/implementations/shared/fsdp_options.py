"""What is a unit told, by every implementation that has the arguments of torch's FSDP class?

torch's own and the reference take the same arguments, each as objects of its own classes; `Words` names them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from fsdp_testing.implementations.protocol import Precision, Setup, WrapPolicy


@dataclass(frozen=True, slots=True)
class Words:
    """One implementation's classes for the same things.

    Attributes:
        strategies: Its enum's member for each strategy of a setup.
        prefetch: The same for backward prefetch.
        mixed_precision: Its class of that name.
        cpu_offload: Its class of that name.
        module_policy: Its policy that chooses by module class.
        size_policy: Its policy that chooses by size.
        custom_policy: Its policy that chooses by a function of the module.
    """

    strategies: Mapping[str, Any]
    prefetch: Mapping[str, Any]
    mixed_precision: Callable[..., Any]
    cpu_offload: Callable[..., Any]
    module_policy: Callable[..., Any]
    size_policy: Callable[..., Any]
    custom_policy: Callable[..., Any]

    def options(self, setup: Setup, name: str) -> dict[str, Any]:
        """What wrapping is told about the unit `name`, but for strategy and backward prefetch."""
        on_mesh = setup.unit_strategies.get(name, setup.strategy).startswith("hybrid")
        return {
            "device_mesh": setup.mesh if on_mesh else None,
            "process_group": None if on_mesh else setup.group,
            "mixed_precision": self._precision(setup.unit_precisions.get(name, setup.precision)),
            "cpu_offload": self.cpu_offload(offload_params=True) if setup.cpu_offload else None,
            "sync_module_states": setup.sync_module_states,
            "forward_prefetch": setup.forward_prefetch,
            "device_id": setup.device,
        }

    def strategy(self, setup: Setup, name: str) -> Any:
        """The strategy of the unit `name`."""
        return self.strategies[setup.unit_strategies.get(name, setup.strategy)]

    def policy(self, module: nn.Module, policy: WrapPolicy) -> Any:
        """The automatic wrapping, as an object that the implementation takes."""
        if policy.classes:
            return self.module_policy(set(policy.classes))
        if policy.min_numel is not None:
            return partial(self.size_policy, min_num_params=policy.min_numel)
        chosen = {id(module.get_submodule(name)) for name in policy.names}
        return self.custom_policy(lambda candidate: id(candidate) in chosen)

    def _precision(self, precision: Precision) -> Any:
        if precision == Precision():
            return None
        return self.mixed_precision(
            param_dtype=precision.param_dtype,
            reduce_dtype=precision.reduce_dtype,
            buffer_dtype=precision.buffer_dtype,
            keep_low_precision_grads=precision.keep_low_precision_grads,
            cast_forward_inputs=precision.cast_unit_inputs,
            cast_root_forward_inputs=precision.cast_inputs,
        )
