"""Code of a pool's process that replaces a process of a test class."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

from fsdp_testing.base import env
from fsdp_testing.plugin.test_classes.processes import Ended
from fsdp_testing.ranks.pool import Failed
from fsdp_testing.ranks.pool.channel import loads
from fsdp_testing.ranks.pool.targets import Target, resolve
from fsdp_testing.ranks.pool.world import current_world


class Pipe:
    """Stands for the pipe to the process that started this one; the pool carries errors and takes stacks instead."""

    def __init__(self) -> None:
        self.closed = False
        self._read, self._write = os.pipe()

    def fileno(self) -> int:
        """Return a descriptor on which nothing ever arrives."""
        return self._read

    def send(self, _text: object) -> None:
        """Drop what is sent: the exception itself is reported."""

    def close(self) -> None:
        """Close both ends."""
        if not self.closed:
            self.closed = True
            os.close(self._read)
            os.close(self._write)


def exit_of(call: Callable[[], object], error_code: int, quiet: frozenset[int] | None) -> Any:
    """Return how a process that runs `call` ends.

    Args:
        call: The call of the process.
        error_code: The exit code that means that the test raised.
        quiet: Exit codes besides 0 after which the others go on; after any other they are stopped. None: after any.

    Raises:
        Exception: The test's exception, whether it left the call or became the `error_code`.
        SystemExit: The test's, of code 0: what follows the exit was not run. Classes end their own `_run` with this code.
    """
    try:
        call()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        reason = end.__context__
        if code == error_code and isinstance(reason, Exception):
            reason.__context__ = None
            raise reason from reason.__cause__
        if not code and quiet is not None and 0 not in quiet and _left_the_test(end):
            raise
        ended = Ended(code, str(reason) if reason is not None and code else "")
        return ended if quiet is None or code in quiet or not code else Failed(ended)
    return Ended()


def _left_the_test(end: SystemExit) -> bool:
    """Return whether the exit came from below the called method, and not from the method or those that it overrides."""
    frames = [frame.f_code.co_name for frame, _ in traceback.walk_tb(end.__traceback__)][1:]
    return len(set(frames)) > 1


def run_process(
    holder: Target, method: str, calls: list[tuple[tuple[Any, ...], dict[str, Any]]], error_code: int, quiet: Any
) -> Any:
    """Call a class method as this rank's process; an argument of None is replaced by the pipe.

    Args:
        holder: The class.
        method: Its method that a new process calls.
        calls: Arguments by rank.
        error_code: As in `exit_of`.
        quiet: As in `exit_of`.
    """
    args, kwargs = calls[current_world().rank]
    function = getattr(resolve(holder), method)
    pipe = Pipe()
    with contextlib.closing(pipe), env.temporary({"TORCH_SHOW_CPP_STACKTRACES": env.get("TORCH_SHOW_CPP_STACKTRACES")}):
        given = tuple(pipe if argument is None else argument for argument in args)
        return exit_of(partial(function, *given, **kwargs), error_code, quiet)


def begin_class(holder: Target, method: str, size: int, rendezvous: str, quiet: frozenset[int]) -> Any:
    """Make the group of a class whose processes stay for all its tests."""
    cls: Any = resolve(holder)
    cls.rank, cls.world_size = current_world().rank, size
    return exit_of(partial(getattr(cls, method), cls.rank, size, rendezvous), -1, quiet)


def run_test_of_class(holder: Target, method: str, test_id: str, quiet: frozenset[int]) -> Any:
    """Run one test of such a class."""
    return exit_of(partial(getattr(resolve(holder), method), test_id), -1, quiet)


def run_object(holder: Target, method: str, payload: bytes, last: str) -> Ended:
    """Call `method` of a pickled object with its rank, the number of ranks and the arguments pickled with it.

    Args:
        holder: The object's class, imported before the object is read.
        method: The method to call.
        payload: The object, attributes to set on it, further arguments.
        last: Method to call after it.

    Returns:
        An end with the reason why the test was skipped, if the method returned one.
    """
    resolve(holder)
    (instance, attributes, arguments), _ = loads(payload)
    for name, value in attributes.items():
        setattr(instance, name, value)
    world = current_world()
    why = getattr(instance, method)(world.rank, world.size, env.get("MASTER_PORT"), *arguments)
    getattr(instance, last)()
    return Ended(0, str(why or ""))
