"""Errors of the reference, in one tree; each class also derives from the built-in type that torch's FSDP raises.

``except FsdpError`` catches everything the reference raises on purpose, while code written for torch's FSDP, which catches
``ValueError``, ``RuntimeError``, ``AssertionError``, ``NotImplementedError`` or ``TypeError``, keeps working. All messages
have one form: where, expected, got, what to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class FsdpError(Exception):
    """Base of every error that fsdp_ref raises."""


class FsdpValueError(FsdpError, ValueError):
    """An argument has the right type and a value that cannot be used."""


class FsdpTypeError(FsdpError, TypeError):
    """An argument has a type that cannot be used."""


class FsdpRuntimeError(FsdpError, RuntimeError):
    """An operation was called at a time or in a setting in which it has no meaning."""


class FsdpAssertionError(FsdpError, AssertionError):
    """A rule was broken that torch's FSDP checks by an assertion; it is checked even with ``python -O``."""


class UnsupportedError(FsdpError, NotImplementedError):
    """A combination of options that the reference refuses; the message says what to use instead."""


class FlattenError(FsdpValueError):
    """Parameters cannot share one flat parameter (dtype, ``requires_grad``, emptiness, device)."""


class MaterializeError(FsdpError, AttributeError):
    """A module on the meta device cannot be initialised."""


class ConfigError(FsdpValueError):
    """Configuration values contradict each other or cannot be read."""


class ConfigTypeError(FsdpTypeError):
    """A configuration value is neither ours nor torch's object of that name."""


class TransitionError(FsdpRuntimeError):
    """A unit would move to a state that its transition table does not allow."""


class TrainingStateError(FsdpValueError):
    """An operation ran while the unit was in a training state that forbids it ("expected to be in states")."""


class UnshardConflictError(FsdpAssertionError):
    """Parameters were unsharded by hand while forward, backward or another unshard uses them."""


class RootError(FsdpRuntimeError):
    """A root-only operation was called on a nested unit, or two units both claim to be the root."""


class WritebackError(FsdpRuntimeError):
    """A parameter or gradient that the user replaced cannot be copied into the flat parameter."""


class ParametersChangedError(FsdpAssertionError, RuntimeError):
    """Parameters changed where they must not: between a forward and its backward, or in forward in a way that is lost."""


class SharedParameterError(UnsupportedError):
    """The set of tied parameters changed after construction."""


class ExecutionOrderError(FsdpRuntimeError):
    """Ranks are about to run their units in different orders, which would mismatch collectives."""


class CommHookError(FsdpAssertionError):
    """A communication hook was registered twice, on a nested unit, or for a strategy that takes none."""


class AlreadyAppliedError(FsdpAssertionError):
    """A composable API was applied to a module that already carries it or an incompatible one."""


class ModifiedFqnsError(FsdpRuntimeError):
    """A composable API changed parameter, buffer or module names."""


def listing(items: Iterable[object], *, limit: int = 50) -> str:
    """Return the offenders as one comma separated string, with a count of those beyond ``limit``."""
    shown = [str(item) for item in items]
    hidden = len(shown) - limit
    return ", ".join(shown[:limit]) + (f" and {hidden} more" if hidden > 0 else "")
