"""Which checks are there? Every suite's, by name, in the order in which reports list them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from fsdp_testing.checks.suites import (
    accumulation,
    backwards,
    beside_ddp,
    buffers,
    checkpointing,
    clipping,
    comm_hooks,
    construction,
    conversion,
    exceptions,
    forward_only,
    frozen,
    hybrid,
    initial_states,
    mixed_precision,
    not_finite,
    offload,
    options,
    outputs,
    parameter_hooks,
    parts,
    pending_gradients,
    prefetch,
    real_models,
    saving,
    shared,
    sizes,
    streams,
    summon,
    trace_rules,
    training,
    unsharding,
    unused,
    zero_grad,
)
from fsdp_testing.checks.suites.check import Check

_SUITES = (
    construction,
    initial_states,
    training,
    accumulation,
    pending_gradients,
    backwards,
    zero_grad,
    forward_only,
    unused,
    frozen,
    shared,
    buffers,
    sizes,
    mixed_precision,
    clipping,
    not_finite,
    parameter_hooks,
    outputs,
    summon,
    unsharding,
    offload,
    beside_ddp,
    saving,
    checkpointing,
    prefetch,
    options,
    comm_hooks,
    exceptions,
    conversion,
    parts,
    trace_rules,
    streams,
    real_models,
    hybrid,
)

CHECKS: Mapping[str, Check] = MappingProxyType({check.name: check for suite in _SUITES for check in suite.SUITE.checks})
"""Every check by name."""

__all__ = ["CHECKS", "Check"]
