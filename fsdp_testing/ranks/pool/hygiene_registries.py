"""Compares what Python keeps by name for the whole process: loggers, context variables, how classes are pickled.

Libraries add to these on first use, for good. So only what was there before a job, or is the user's own, can be a leak.
"""

from __future__ import annotations

import contextvars
import copyreg
import logging
import sys
from collections.abc import Iterator
from typing import Any

from fsdp_testing.ranks.pool.hygiene_leftovers import Probe
from fsdp_testing.ranks.pool.hygiene_settings import INSTALLED


class _Same:
    """A value that equals itself alone: a comparison of what users hold may raise."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]  # only compared


def _context() -> dict[Any, Any]:
    return {variable: _Same(value) for variable, value in contextvars.copy_context().items()}


def _tell_context(before: dict[Any, Any], now: dict[Any, Any]) -> Iterator[str]:
    changed = [variable for variable in now if before.get(variable) != now[variable]]
    modules = list(sys.modules.values()) if changed else []
    files = [(module, getattr(module, "__file__", None) or "<") for module in modules]
    own = [vars(module) for module, file in files if not any(part in file for part in INSTALLED)]
    # Libraries set theirs on first use, for good.
    for variable in [one for one in changed if any(value is one for names in own for value in list(names.values()))]:
        was = repr(before[variable].value) if variable in before else "without a value"
        yield f"{variable.name}: {was} -> {now[variable].value!r}"


def _put_context(before: dict[Any, Any], now: dict[Any, Any]) -> None:
    for variable, earlier in before.items():
        if earlier != now.get(variable):
            variable.set(earlier.value)


class _Loggers:
    """All loggers, listed again once there are more; of torch's own, levels follow its settings of logs."""

    def __init__(self) -> None:
        self._count = 0
        self._named: list[tuple[str, bool, logging.Logger]] = []

    def read(self) -> dict[str, tuple[int, bool, bool]]:
        known = logging.root.manager.loggerDict
        if len(known) != self._count:
            self._count = len(known)
            self._named = [
                (name, name.partition(".")[0] != "torch", logger)
                for name, logger in list(known.items())
                if isinstance(logger, logging.Logger)
            ]
        return {name: (own and one.level, one.propagate, one.disabled) for name, own, one in self._named}


def _tell_loggers(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    # A new logger is of code that the test was the first to import.
    changes: dict[str, list[str]] = {}
    for name in [name for name in before if now.get(name, before[name]) != before[name]]:
        for what, old, new in zip(("level", "propagate", "disabled"), before[name], now[name], strict=True):
            if old != new:
                changes.setdefault(f"{what}: {old!r} -> {new!r}", []).append(name)
    yield from (f"{change} of {', '.join(sorted(names))}" for change, names in changes.items())


def _put_loggers(before: dict[str, Any], now: dict[str, Any]) -> None:
    for name in [name for name in before if now.get(name, before[name]) != before[name]]:
        logger = logging.getLogger(name)
        level, logger.propagate, logger.disabled = before[name]
        if level is not False:
            logger.setLevel(level)


def _tell_reducers(before: dict[Any, Any], now: dict[Any, Any]) -> Iterator[str]:
    for kind in _changed_reducers(before, now):
        yield f"copyreg: {kind.__qualname__} is pickled by {now[kind]!r}"


def _put_reducers(before: dict[Any, Any], now: dict[Any, Any]) -> None:
    for kind in _changed_reducers(before, now):
        if kind in before:
            copyreg.dispatch_table[kind] = before[kind]
        else:
            del copyreg.dispatch_table[kind]


def _changed_reducers(before: dict[Any, Any], now: dict[Any, Any]) -> list[Any]:
    # A library adds a function of its module, for good, when it is imported.
    changed = [kind for kind, function in now.items() if before.get(kind) is not function]
    return [kind for kind in changed if "<locals>" in getattr(now[kind], "__qualname__", "")]


REGISTRY_PROBES: tuple[Probe, ...] = (
    Probe("logger", _Loggers().read, _put_loggers, _tell_loggers),
    Probe("context variable", _context, _put_context, _tell_context),
    Probe("pickling", copyreg.dispatch_table.copy, _put_reducers, _tell_reducers),
)
