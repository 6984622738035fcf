"""Wrap policies under torch's module name: ``from fsdp_ref.wrap import ModuleWrapPolicy``."""

from fsdp_ref.build.wrap_policy import (
    CustomPolicy,
    LambdaWrapPolicy,
    ModuleWrapPolicy,
    Policy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    or_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)

_FSDPPolicy = Policy
_Policy = Policy
_or_policy = or_policy

__all__ = [
    "CustomPolicy",
    "LambdaWrapPolicy",
    "ModuleWrapPolicy",
    "Policy",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]
