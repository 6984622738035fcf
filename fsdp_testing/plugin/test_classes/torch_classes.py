"""Starts the processes of torch's multi-process test classes on the pool. Only this file knows their private names.

It replaces few methods of torch's classes, in the controlling process alone:

- `MultiProcessTestCase`: `_spawn_processes` notes what each process is to call, `_join_processes` has it called in new
  processes, judges every one of them and lets the class check the exit codes. Everything else is the class's own,
  including `setUp`, `tearDown` and what a process calls (`_run`).
- `MultiProcContinuousTest`: `_spawn_processes` takes processes that stay for the class and replaces its queues: `put` gives
  the next test, `get` waits for its end.
"""

from __future__ import annotations

import functools
import sys
import tempfile
import unittest
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fsdp_testing.errors import HarnessError, WorldFailed
from fsdp_testing.plugin.test_classes.processes import Ended, Processes
from fsdp_testing.plugin.worlds import was_lost
from fsdp_testing.ranks.pool.hygiene import ENDS_WITH_PROCESS
from fsdp_testing.ranks.pool.targets import Target, target_of

__tracebackhide__ = True  # pytest shows the caller's frames and the ranks' errors, not these frames

_HOME = "torch.testing._internal.common_distributed"
_IN_RANK = "fsdp_testing.plugin.test_classes.in_rank"
_REPLACED = "_fsdp_testing_pool"


def loaded() -> bool:
    """Return whether this process has imported torch's test classes; without them there is nothing to replace."""
    return _HOME in sys.modules


def take_over() -> None:
    """Make torch's multi-process test classes run on the pool. Repeated calls have no effect."""
    from torch.testing._internal import common_distributed as home

    case: Any = home.MultiProcessTestCase
    continuous: Any = home.MultiProcContinuousTest
    if hasattr(case, _REPLACED):
        return
    setattr(case, _REPLACED, True)
    case._spawn_processes = _note_processes
    case._join_processes = _run_processes
    continuous._spawn_processes = classmethod(_keep_processes)
    continuous.setUp = _watched(continuous.setUp)


def _skip_codes() -> dict[int, str]:
    from torch.testing._internal.common_distributed import TEST_SKIPS

    return {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}


def _reference(cls: type) -> Target:
    """Name a class so that a rank can import it. Those made by `instantiate_device_type_tests` have another `__qualname__`."""
    module = sys.modules.get(cls.__module__)
    if getattr(module, cls.__name__, None) is cls:
        return Target(cls.__module__, cls.__name__, getattr(module, "__file__", None))
    return target_of(cls)


class _Noted:
    """A process that a test class asked for, in place of `multiprocessing.Process`."""

    def __init__(self, target: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.name = name
        self.method = target.__func__.__name__
        self.pipes = [argument for argument in args if isinstance(argument, Connection)]
        self.args = tuple(None if isinstance(argument, Connection) else argument for argument in args)
        self.kwargs = kwargs
        self.exitcode: int | None = None
        self.pid = id(self)

    def start(self) -> None:
        """Do nothing: all processes begin together when the test joins them."""

    def terminate(self) -> None:
        """Do nothing: all processes have ended when a class calls this."""


def _note_processes(case: Any) -> None:
    """Replaces `MultiProcessTestCase._spawn_processes`."""
    if type(case)._join_processes is not _run_processes:
        raise HarnessError(_refusal(case, "a class that overrides _join_processes"))
    case._start_processes(_Noted)
    noted = list(case.processes)
    _fail_unless(case, lambda: all(process.exitcode is not None for process in noted))


def _fail_unless(case: Any, ran: Callable[[], bool]) -> None:
    """Fail a test that ends although no process ran."""
    call = case._callTestMethod

    def check(method: Callable[[], object]) -> None:
        __tracebackhide__ = True
        call(method)
        if not ran():
            raise HarnessError(_refusal(case, "a test that passed without a process"))

    case._callTestMethod = check


def _refusal(case: Any, got: str) -> str:
    return (
        f"{case.id()}: expected a test of processes that the pool starts, got {got}. Call self._spawn_processes() in setUp of "
        f"{type(case).__name__}, override nothing that starts or joins processes, or run this class without --dist-pool."
    )


def _run_processes(case: Any, fn: Callable[[], object]) -> None:
    """Run the noted processes; in place of `MultiProcessTestCase._join_processes`."""
    from torch.testing._internal.common_distributed import get_timeout

    noted = list(case.processes)
    name, cls = case.id(), type(case)
    if not noted or not all(isinstance(process, _Noted) for process in noted):
        raise HarnessError(_refusal(case, "processes that the class started itself" if noted else "no process"))
    accepted = _accepted(case, fn)
    quiet = None if fn in case.skip_return_code_checks else frozenset({*_skip_codes(), *_expected(case, fn)})
    calls = [(process.args, process.kwargs) for process in noted]
    try:
        with Processes(len(noted)) as processes:
            ended = processes.run(
                f"{_IN_RANK}:run_process",
                *(_reference(cls), noted[0].method, calls, case.TEST_ERROR_EXIT_CODE, quiet),
                name=name,
                timeout=get_timeout(name),
                accepted=accepted,
                lasting=ENDS_WITH_PROCESS,
            )
            seconds = processes.seconds
    except WorldFailed as error:
        _fail_for_certain(case, error)
        raise
    finally:
        for pipe in (*case.pid_to_pipe.values(), *(pipe for process in noted for pipe in process.pipes)):
            pipe.close()
    for process, each in zip(noted, ended, strict=True):
        process.exitcode = each.code
    _raise_skip(ended[0], only_generic=True)
    case._check_return_codes(fn, seconds)


def _expected(case: Any, fn: Callable[[], object]) -> tuple[int, ...]:
    return (case.special_return_code_checks[fn],) if fn in case.special_return_code_checks else ()


def _accepted(case: Any, fn: Callable[[], object]) -> Callable[[int], bool] | None:
    """Return the exit codes that the test declares good for any process; None if it declares none."""
    if fn in case.skip_return_code_checks:
        return lambda code: True
    special = _expected(case, fn)
    return (lambda code: code in special) if special else None


def _raise_skip(first: Ended, *, only_generic: bool = False) -> None:
    """Skip the test where its processes did, with the reason that they gave."""
    message = _skip_codes().get(first.code)
    if message is not None and (first.why or not only_generic):
        raise unittest.SkipTest(first.why or message)


def _fail_for_certain(case: Any, error: WorldFailed) -> None:
    """Fail a test if one of its processes died or hung, even if it is marked `expectedFailure`."""
    outcome = getattr(case, "_outcome", None)
    if outcome is not None and was_lost(error):
        outcome.expecting_failure = False


class _Kept:
    """The processes of a class of continuous style; the class sees one process and its two queues."""

    def __init__(self, cls: Any, size: int) -> None:
        self._cls, self._size = cls, size
        self._processes: Processes | None = None
        self._skipped: Ended | None = None
        self._rendezvous = ""
        self._test_id = ""
        self.case: Any = None
        self.ran = False

    def put(self, test_id: str | None) -> None:
        """Note the next test; None: the last one has ended."""
        self._test_id, self.ran = test_id or "", False

    def get(self, timeout: float | None = None) -> str:
        """Run the test and return its id, as the queue of results would. An exception is raised, not returned.

        After a failure the next test gets new processes, where torch would skip the rest of the class.
        """
        __tracebackhide__ = True
        del timeout  # of one wait on a queue
        self.ran = True
        try:
            self._run(self._test_id)
        except WorldFailed as error:
            self.join()
            _fail_for_certain(self.case, error)
            raise
        return self._test_id

    def _run(self, name: str) -> None:
        __tracebackhide__ = True
        from torch.testing._internal.common_distributed import get_timeout

        timeout, holder, quiet = get_timeout(name), _reference(self._cls), frozenset(_skip_codes())
        if self._processes is None:
            self._processes = Processes(self._size)
            self._rendezvous = _empty_file()
            arguments = holder, "_init_pg", self._size, self._rendezvous, quiet
            # The group and other objects that a class makes for all its tests are no leaks of a test.
            begun = self._processes.run(f"{_IN_RANK}:begin_class", *arguments, name=name, timeout=timeout)
            self._skipped = begun[0] if begun[0].code else None
        ended = self._skipped
        if ended is None:
            ended = self._processes.run(
                f"{_IN_RANK}:run_test_of_class",
                *(holder, "_run_test_given_id", name, quiet),
                name=name,
                timeout=timeout,
                lasting=frozenset({"open file"}),
            )[0]
        if ended.code:
            _raise_skip(ended)
            self.join()
            raise AssertionError(f"every process ended with exit code {ended.code}")

    def join(self) -> None:
        """End the processes; the class calls it after its last test."""
        if self._processes is not None:
            self._processes.close()
            self._processes = None
            Path(self._rendezvous).unlink(missing_ok=True)


def _empty_file() -> str:
    with tempfile.NamedTemporaryFile(delete=False) as file:
        return file.name


def _keep_processes(cls: Any, world_size: int) -> None:
    """Replaces `MultiProcContinuousTest._spawn_processes`."""
    kept = _Kept(cls, int(world_size))
    cls.processes = cls.task_queues = cls.completion_queues = [kept]
    cls.rdvz_file = _empty_file()


def _watched(set_up: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a `setUp` of the continuous class that notes the test and checks that it ran."""

    @functools.wraps(set_up)
    def watch(case: Any) -> None:
        set_up(case)
        kept = case.processes[0] if len(case.processes) == 1 else None
        if not isinstance(kept, _Kept):
            raise HarnessError(_refusal(case, "processes that the class started itself"))
        kept.case = case
        _fail_unless(case, lambda: kept.ran)

    return watch
