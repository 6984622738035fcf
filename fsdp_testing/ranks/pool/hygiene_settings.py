"""Compares the settings of Python and torch that a job may leave changed, from the environment to hooks on modules."""

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
import torch.distributed as dist

from fsdp_testing.base import compat, env
from fsdp_testing.ranks.ledger import messages
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


def _start_method() -> str:
    # An unset value and one that was only read are the same.
    return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


LIBRARY = settings_probe(
    "library default",
    [
        Setting("decimal context", _decimal, _set_decimal),
        Setting("numpy.seterr", _numpy_errors, _set_numpy_errors),
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

_DEVICES = ("cpu", "cuda")
_TINIEST = 5e-324


def _autocast(device: str) -> list[Setting]:
    def set_enabled(value: bool) -> None:
        torch.set_autocast_enabled(device, value)
        torch.clear_autocast_cache()

    return [
        Setting(f"autocast of {device}", lambda: torch.is_autocast_enabled(device), set_enabled),
        Setting(
            f"autocast dtype of {device}",
            lambda: torch.get_autocast_dtype(device),
            lambda value: torch.set_autocast_dtype(device, value),
        ),
    ]


DEFAULTS = settings_probe(
    "torch default",
    [
        Setting("default dtype", torch.get_default_dtype, torch.set_default_dtype),
        Setting(
            "default device",
            torch.get_default_device,
            # `None` removes the mode that any other value would leave on the stack.
            lambda device: torch.set_default_device(None if device.type == "cpu" else device),
        ),
        Setting("intra-op threads", torch.get_num_threads, torch.set_num_threads),
        Setting("grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
        Setting("inference mode", torch.is_inference_mode_enabled),
        Setting(
            "anomaly mode",
            lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            lambda value: torch.autograd.set_detect_anomaly(*value),
        ),
        *(setting for device in _DEVICES for setting in _autocast(device)),
        Setting("autocast cache", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
        Setting(
            "deterministic algorithms",
            lambda: (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
        ),
        attribute(torch.utils.deterministic, "fill_uninitialized_memory", "fill_uninitialized_memory"),
        Setting("float32 matmul precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        *(attribute(torch.backends.cudnn, name, f"cudnn.{name}") for name in ("enabled", "benchmark", "deterministic")),
        Setting("flush denormals", lambda: _TINIEST + 0.0 == 0.0, torch.set_flush_denormal),
        Setting("tensor sharing strategy", torch.multiprocessing.get_sharing_strategy, None),
        Setting("warn_always", torch.is_warn_always_enabled, torch.set_warn_always),
    ],
)


def _hooks() -> list[tuple[int, int]]:
    return [(i, key) for i, hooks in enumerate(compat.global_module_hooks()) for key in hooks]


def _groups() -> tuple[Any, list[Any], int]:
    if not dist.is_available() or not dist.is_initialized():
        return None, [], 0
    # The count also differs when a group was made and destroyed again, which is no leak but explains open sockets.
    return dist.group.WORLD, list(compat.process_groups()), compat.process_group_count()


def _tell_groups(before: tuple[Any, list[Any], int], now: tuple[Any, list[Any], int]) -> Iterator[str]:
    if before[0] is not now[0]:
        yield "the default process group was destroyed" if now[0] is None else "the default process group was replaced"
        return
    for group in now[1]:
        if group not in before[1]:
            ranks = dist.get_process_group_ranks(group)
            name = getattr(group, "group_desc", "") or getattr(group, "group_name", "")
            yield f"process group {name!r} of ranks {ranks} was not destroyed"
    for group in before[1]:
        if group not in now[1]:
            yield "a process group that the job did not make was destroyed"


def _cuda_memory() -> int:
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return 0
    return torch.cuda.memory_allocated()


TORCH_PROBES: tuple[Probe, ...] = (
    DEFAULTS,
    Probe("torch mode", compat.mode_depths),
    leftovers_probe(
        "module hook",
        _hooks,
        lambda hook: f"{compat.global_module_hooks()[hook[0]][hook[1]]!r} on every module was added",
        lambda hook: compat.global_module_hooks()[hook[0]].pop(hook[1]),
        lost="a hook on every module was removed",
    ),
    Probe("process group", _groups, None, _tell_groups),
    leftovers_probe(
        "message",
        messages.pending,
        lambda message: f"{message[1]} was never waited for: a later call may receive it",
    ),
    Probe(
        "CUDA memory",
        _cuda_memory,
        None,
        lambda before, now: iter([f"{now - before} bytes of CUDA memory are still allocated"] if now > before else []),
        collect_first=True,
    ),
)
