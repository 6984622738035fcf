"""Every check by name, in the order in which reports list them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from fsdp_testing.checks.suites import (
    access,
    compiled,
    construction,
    evaluation,
    loss_scaling,
    optimizer_state,
    options,
    parameters,
    precision,
    schemes,
    state,
    training,
    user_code,
)
from fsdp_testing.checks.suites.check import Check

_STATES = (access, state, optimizer_state)
_NUMBERS = (precision, evaluation, loss_scaling)
_THEMES = (construction, training, parameters, *_NUMBERS, *_STATES, options, compiled, user_code, schemes)

CHECKS: Mapping[str, Check] = MappingProxyType({check.name: check for theme in _THEMES for check in theme.CHECKS})
"""Every check by name."""

__all__ = ["CHECKS", "Check"]
