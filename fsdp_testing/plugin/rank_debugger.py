"""Debugs one of N ranks: the chosen rank gets the terminal; `breakpoint()` in the others says how to choose them.

Ranks have no terminal: their descriptors lead to the controller. Under `--rank-pdb R`, rank R opens the controller's
terminal by name, for `breakpoint()` and to inspect the frames of a failure.
"""

from __future__ import annotations

import inspect
import os
import pdb  # noqa: T100 - this file is the debugger's door into a rank
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import pytest

from fsdp_testing.plugin.records import Debugging
from fsdp_testing.ranks.pool.world import current_world


def debugged_rank(config: pytest.Config) -> tuple[int, str] | None:
    """Return the rank of `--rank-pdb` and the name of the terminal it gets; None without the option.

    Raises:
        pytest.UsageError: The rank is no number, or there is no terminal to give.
    """
    text = config.option.rank_pdb
    if text is None:
        return None
    if not text.isdecimal():
        raise pytest.UsageError(f"--rank-pdb: expected a rank such as 0, got {text!r}. Give the rank to debug.")
    terminal = terminal_name()
    if getattr(config.option, "numprocesses", None) or terminal is None:
        raise pytest.UsageError(
            "--rank-pdb: expected a terminal for the debugged rank, got none. Run pytest in a terminal, without -n."
        )
    return int(text), terminal


def terminal_name() -> str | None:
    """Return the device of this process's terminal; pytest keeps it open under another number while it captures."""
    for entry in sorted(Path("/proc/self/fd").iterdir(), key=lambda path: int(path.name)):
        try:
            target = str(entry.readlink())
        except OSError:
            continue  # the descriptor through which the folder was read
        if target.startswith(("/dev/pts/", "/dev/tty")) and target != "/dev/tty":
            return target
    return None


class _PostMortem:
    """Opens the debugger at the failure of this rank's test."""

    def __init__(self, reading: TextIO, writing: TextIO, rank: int) -> None:
        self._reading = reading
        self._writing = writing
        self._rank = rank

    def pytest_exception_interact(self, call: pytest.CallInfo[Any]) -> None:
        if call.excinfo is None:
            return
        self._writing.write(f"\n>>> rank {self._rank}: {call.excinfo.exconly()}\n")
        debugger(self._reading, self._writing).interaction(None, call.excinfo.tb)


def debugger(reading: TextIO, writing: TextIO) -> pdb.Pdb:
    """Return a debugger on the terminal's two ends."""
    made = pdb.Pdb(stdin=reading, stdout=writing)
    made.prompt = f"(rank {current_world().rank} pdb) "
    return made


@contextmanager
def attached(config: pytest.Config, debugging: Debugging | None) -> Iterator[None]:
    """While open, `breakpoint()` does what this rank's place allows; failures open the debugger in the chosen rank."""
    hook = sys.breakpointhook
    rank = current_world().rank
    if debugging is None or debugging.rank != rank:
        sys.breakpointhook = _refuse
        try:
            yield
        finally:
            sys.breakpointhook = hook
        return
    with _terminal(debugging.terminal) as (reading, writing):
        plugin = _PostMortem(reading, writing, rank)
        config.pluginmanager.register(plugin, "fsdp_testing.post_mortem")
        sys.breakpointhook = lambda *_, **__: debugger(reading, writing).set_trace(_caller())
        try:
            yield
        finally:
            sys.breakpointhook = hook
            config.pluginmanager.unregister(plugin)


@contextmanager
def _terminal(name: str) -> Iterator[tuple[TextIO, TextIO]]:
    # O_NOCTTY: the terminal stays the controlling one of the person's shell, whose Ctrl-C goes to the controller.
    read = os.open(name, os.O_RDONLY | os.O_NOCTTY)
    write = os.open(name, os.O_WRONLY | os.O_NOCTTY)
    with os.fdopen(read, "r") as reading, os.fdopen(write, "w", buffering=1) as writing:
        yield reading, writing


def _caller() -> FrameType | None:
    frame = inspect.currentframe()
    return frame.f_back.f_back if frame is not None and frame.f_back is not None else None


def _refuse(*_: Any, **__: Any) -> None:
    rank = current_world().rank
    raise RuntimeError(
        f"breakpoint() in rank {rank}: expected a terminal, and ranks have none. "
        f"Run this one test with --rank-pdb {rank} to debug this rank."
    )
