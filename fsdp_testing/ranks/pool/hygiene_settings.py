"""Compares the settings of Python that a job may leave changed, from the environment to warnings filters."""

from __future__ import annotations

import atexit
import builtins
import decimal
import faulthandler
import gc
import logging
import multiprocessing
import os
import re
import signal
import socket
import sys
import sysconfig
import threading
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fsdp_testing.base import env
from fsdp_testing.ranks.pool.hygiene_leftovers import (
    Probe,
    Setting,
    attribute,
    leftovers_probe,
    list_attribute,
    settings_probe,
)

_SIGNALS = (
    signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE,
    signal.SIGUSR1, signal.SIGSEGV, signal.SIGUSR2, signal.SIGPIPE, signal.SIGALRM, signal.SIGTERM, signal.SIGCHLD,
    signal.SIGCONT, signal.SIGTSTP, signal.SIGVTALRM, signal.SIGPROF, signal.SIGWINCH,
)  # fmt: skip
# Skips the enum that Python's own function makes: that was a fifth of the cost of a clean comparison.
_handler_of = getattr(signal.getsignal, "__wrapped__", signal.getsignal)


def _installed(folder: Path) -> set[str]:
    """Return the path prefixes of what `pip install --target` put beside the user's modules; site-packages count whole."""
    records = folder.glob("*.dist-info/RECORD") if folder.name not in ("site-packages", "dist-packages") else ()
    tops = [re.findall(r"^[^/,\n]+/?", record.read_text("utf-8", "replace"), re.MULTILINE) for record in records]
    return {f"{folder.absolute()}/{top}" for listed in tops for top in listed}


# Parts of paths of files that are not code under test. A self-built torch lies in a checkout, outside all of them.
INSTALLED = (
    "/site-packages/", "/dist-packages/", f"{sysconfig.get_path('stdlib')}/", f"{Path(torch.__file__).parent}/", "<",
    *(top for folder in map(Path, sys.path) for top in _installed(folder)))  # fmt: skip
# pytest names the running test and its phase here, and changes it itself.
_CURRENT_TEST = b"PYTEST_CURRENT_TEST"
# torch.compile sets these once, on import: removing them would break it, and naming them would blame the test.
_SET_BY_IMPORT = (b"TORCHINDUCTOR_CACHE_DIR", b"TRITON_CACHE_DIR")


def _environment() -> dict[bytes, bytes]:
    values = env.encoded()
    values.pop(_CURRENT_TEST, None)
    return values


def _tell_environment(before: dict[bytes, bytes], now: dict[bytes, bytes]) -> Iterator[str]:
    for key in sorted(_changed(before, now)):
        name = os.fsdecode(key)
        old, new = (None if key not in values else os.fsdecode(values[key]) for values in (before, now))
        if new is None:
            yield f"{name} was removed"
        elif old is None:
            yield f"{name}={new!r} was added"
        else:
            yield f"{name}: {old!r} -> {new!r}"


def _put_environment(before: dict[bytes, bytes], now: dict[bytes, bytes]) -> None:
    earlier = {key: os.fsdecode(before[key]) if key in before else None for key in _changed(before, now)}
    env.update({os.fsdecode(key): value for key, value in earlier.items()})


def _changed(before: dict[bytes, bytes], now: dict[bytes, bytes]) -> set[bytes]:
    differing = {key for key in {*before, *now} if before.get(key) != now.get(key)}
    return {key for key in differing if key in before or key not in _SET_BY_IMPORT}


def _working_directory() -> str:
    try:
        return os.getcwd()  # noqa: PTH109 - a text, read around every job
    except FileNotFoundError:
        return "(a directory that was removed)"


def _install(number: int, handler: Any) -> None:
    # None stands for a handler that was not installed from Python, which Python cannot install again.
    if handler is not None:
        signal.signal(number, handler)


def _tell_filters(before: list[Any], now: list[Any]) -> Iterator[str]:
    # A library that is imported late adds a filter for its own warnings, for good.
    added = [entry for entry in now if entry not in before and entry[2].__module__ == "builtins"]
    removed = [entry for entry in before if entry not in now]
    if added or removed:
        yield f"added {added}, removed {removed}"
    elif [entry for entry in now if entry in before] != before:
        yield "reordered"


def _put_filters(before: list[Any], now: list[Any]) -> None:
    del now
    # The module caches by a version that only its own functions advance, hence the filter added first.
    warnings.simplefilter("default", append=True)
    warnings.filters[:] = before  # type: ignore[index]  # typeshed calls the list a Sequence


def _umask() -> int:
    value = os.umask(0o077)
    os.umask(value)
    return value


def _led_to(number: int) -> object:
    try:
        return os.fstat(number)[1:3]  # inode and device
    except OSError:
        return "closed"


class _Hook:
    """A hook that pytest may replace for every phase of a test: any two of pytest's hooks count as the same."""

    __slots__ = ("_of_pytest", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        function = getattr(value, "func", value)
        self._of_pytest = str(getattr(function, "__module__", "")).startswith("_pytest.")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hook) and (self.value == other.value or (self._of_pytest and other._of_pytest))

    __hash__ = None  # type: ignore[assignment]  # only compared

    def __repr__(self) -> str:
        return repr(self.value)


def _hook(owner: Any, name: str) -> Setting:
    label = f"{owner.__name__}.{name}"
    return Setting(label, lambda: _Hook(getattr(owner, name)), lambda hook: setattr(owner, name, hook.value))


class _ExitHandlers:
    """Functions registered with atexit, which a rank never calls: it leaves through `os._exit`."""

    def __init__(self) -> None:
        self._functions: list[Any] = []

    def watch(self) -> None:
        """Note every function that is registered from now on; once per process."""
        register = atexit.register

        def noted(function: Any, /, *args: Any, **kwargs: Any) -> Any:
            self._functions.append(function)
            return register(function, *args, **kwargs)

        atexit.register = noted

    def registered(self) -> list[Any]:
        return list(self._functions)

    def remove(self, function: Any) -> None:
        atexit.unregister(function)
        self._functions.remove(function)

    def name(self, function: Any) -> str:
        """Return the name of a function; empty for a library's, which is registered for good on first use."""
        inner = getattr(function, "func", function)  # of a partial
        code = getattr(getattr(inner, "__func__", inner), "__code__", None)
        if code is None or any(part in code.co_filename for part in INSTALLED):
            return ""
        return f"{inner.__module__}.{inner.__qualname__} is registered with atexit, which ranks do not run"


EXIT_HANDLERS = _ExitHandlers()

INTERPRETER = settings_probe(
    "interpreter",
    [
        Setting("working directory", _working_directory, os.chdir),
        Setting("umask", _umask, os.umask),
        Setting("what descriptors 0 to 2 lead to", lambda: [_led_to(number) for number in range(3)]),
        *(attribute(sys, name) for name in ("stdin", "stdout", "stderr", "excepthook", "displayhook")),
        _hook(sys, "unraisablehook"),
        _hook(threading, "excepthook"),
        *(attribute(builtins, name) for name in ("__import__", "print", "open", "input", "breakpoint")),
        Setting("sys.settrace", sys.gettrace, sys.settrace),
        Setting("sys.setprofile", sys.getprofile, sys.setprofile),
        Setting("recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
        Setting("switch interval", sys.getswitchinterval, sys.setswitchinterval),
        Setting("gc enabled", gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
        Setting("gc threshold", gc.get_threshold, lambda value: gc.set_threshold(*value)),
        Setting("gc debug flags", gc.get_debug, gc.set_debug),
        Setting(
            "gc callbacks", lambda: tuple(gc.callbacks), lambda before: gc.callbacks.__setitem__(slice(None), before)
        ),
        Setting(
            "faulthandler enabled",
            faulthandler.is_enabled,
            lambda on: faulthandler.enable(file=2) if on else faulthandler.disable(),
        ),
        Setting(
            "blocked signals",
            lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()),
            lambda mask: signal.pthread_sigmask(signal.SIG_SETMASK, mask),
        ),
        Setting(
            "timer armed",
            lambda: signal.getitimer(signal.ITIMER_REAL)[0] > 0,
            lambda _: signal.setitimer(signal.ITIMER_REAL, 0),
        ),
        Setting("CPU affinity", lambda: os.sched_getaffinity(0), lambda value: os.sched_setaffinity(0, value)),
    ],
)


def _decimal() -> tuple[Any, Any]:
    # Without the flags, which any division sets.
    facts: Any = decimal.getcontext().__reduce__()[1]  # precision to clamp, flags, traps
    return facts[:6], facts[7]


def _set_decimal(facts: tuple[Any, Any]) -> None:
    decimal.setcontext(decimal.Context(*(*facts[0], [], facts[1])))


def _numpy_errors() -> Any:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else (numpy.geterr(), numpy.geterrcall())


def _set_numpy_errors(handling: Any) -> None:
    numpy = sys.modules.get("numpy")
    if numpy is not None and handling is not None:
        numpy.seterr(**handling[0])
        numpy.seterrcall(handling[1])


def _numpy_printing() -> Any:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.get_printoptions()


def _set_numpy_printing(options: Any) -> None:
    numpy = sys.modules.get("numpy")
    if numpy is not None and options is not None:
        numpy.set_printoptions(**options)


def _start_method() -> str:
    # An unset value and one that was only read are the same.
    return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


LIBRARY = settings_probe(
    "library default",
    [
        Setting("decimal context", _decimal, _set_decimal),
        Setting("numpy.seterr", _numpy_errors, _set_numpy_errors),
        Setting("numpy.set_printoptions", _numpy_printing, _set_numpy_printing),
        Setting("socket default timeout", socket.getdefaulttimeout, socket.setdefaulttimeout),
        Setting(
            "multiprocessing start method",
            _start_method,
            lambda method: multiprocessing.set_start_method(method, force=True),
        ),
    ],
)

LOGGING = settings_probe(
    "logging",
    [
        Setting("level of the root logger", lambda: logging.root.level, logging.root.setLevel),
        Setting("logging.disable", lambda: logging.root.manager.disable, logging.disable),
        list_attribute(logging.root, "handlers", "handlers of the root logger"),
        attribute(logging, "raiseExceptions"),
        Setting("logger class", logging.getLoggerClass, logging.setLoggerClass),
    ],
)

PYTHON_PROBES: tuple[Probe, ...] = (
    Probe("environment", _environment, _put_environment, _tell_environment),
    INTERPRETER,
    LIBRARY,
    LOGGING,
    leftovers_probe("atexit handler", EXIT_HANDLERS.registered, EXIT_HANDLERS.name, EXIT_HANDLERS.remove),
    settings_probe(
        "signal handler",
        [Setting(number.name, partial(_handler_of, number), partial(_install, number)) for number in _SIGNALS],
    ),
    settings_probe("import path", [list_attribute(sys, name) for name in ("path", "meta_path", "path_hooks", "argv")]),
    Probe("warnings filters", lambda: list(warnings.filters), _put_filters, _tell_filters),
)
