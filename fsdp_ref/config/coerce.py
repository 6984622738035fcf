"""torch's own configuration objects become ours, without importing torch's FSDP.

Users mix imports: a ``MixedPrecision`` of torch with our wrapper, or torch's ``ShardingStrategy``. An enum is
recognised by class name and member name, a configuration object by class name and fields. A field that we do not
know is an error unless it has its own default: a newer torch may add an option, and an option that we would drop
silently is worse than an error.
"""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import TypeVar

from fsdp_ref.config.enums import BackwardPrefetch, ShardingStrategy
from fsdp_ref.config.policies import CPUOffload, MixedPrecision
from fsdp_ref.errors import ConfigTypeError, explain, listing

E = TypeVar("E", bound=Enum)
C = TypeVar("C")


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
        explain(
            where,
            expected=f"a member of {cls.__name__} ({listing(cls.__members__)})",
            got=f"{value!r} of type {type(value).__name__}",
            remedy=f"Pass a member of fsdp_ref.{cls.__name__}",
        )
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
            explain(
                where,
                expected=f"a {cls.__name__}",
                got=f"{value!r} of type {type(value).__name__}",
                remedy=f"Pass fsdp_ref.{cls.__name__}(...) or torch's object of that name",
            )
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
            explain(
                where,
                expected=f"only the options {listing(sorted(known))}",
                got=f"also {listing(unknown)}",
                remedy="Leave them at their defaults; this version does not know them",
            )
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
