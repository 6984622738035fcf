"""Names of parameters without what wrappers add.

A wrapper adds one attribute to every name below it. Users and checkpoints speak of names without these.
"""

from __future__ import annotations

from typing import Final

FSDP_WRAPPED_MODULE: Final = "_fsdp_wrapped_module"
"""Attribute of our wrapper that is the module it wraps."""

FSDP_PREFIX: Final = FSDP_WRAPPED_MODULE + "."
FLAT_PARAM: Final = "_flat_param"
"""Attribute under which a flat parameter is registered when original parameters are not kept."""

CHECKPOINT_PREFIX: Final = "_checkpoint_wrapped_module."
"""What torch's activation-checkpoint wrapper adds to names."""

_WRAPPER_SEGMENTS: Final = frozenset({FSDP_WRAPPED_MODULE, CHECKPOINT_PREFIX.rstrip(".")})


def clean_tensor_name(name: str) -> str:
    """Return ``name`` without the segments that FSDP and activation-checkpoint wrappers added, wherever they occur.

    Works on whole segments: a user's module whose name merely contains such a word keeps it.
    """
    if FSDP_WRAPPED_MODULE not in name and CHECKPOINT_PREFIX not in f"{name}.":
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_SEGMENTS)


def without_wrappers(name: str) -> str:
    """Return ``name`` without our wrapper's segments; those of activation checkpointing stay, as in the plain module."""
    return ".".join(part for part in name.split(".") if part != FSDP_WRAPPED_MODULE)


def join_fqn(prefix: str, name: str) -> str:
    """Return ``prefix.name``, leaving out the dot when either is empty."""
    return f"{prefix}.{name}" if prefix and name else prefix or name
