"""A rank: joins its world, runs one call at a time, reports, leaves without ceremony.

Knows no pytest: a test is a call like any other. Leaves through `os._exit` after flushing, since interpreter shutdown
with a live gloo thread can abort (pytorch #179291, #190489).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import resource
import signal
import socket
import sys
import time
import traceback
from typing import Any

from fsdp_testing.base import env, measured
from fsdp_testing.errors import BackendUnavailable, HarnessError
from fsdp_testing.ranks.faults.fault import end_all, never_reached
from fsdp_testing.ranks.ledger.memory import LedgerMemory
from fsdp_testing.ranks.pool import world as world_place
from fsdp_testing.ranks.pool.channel import Channel, dumps, loads
from fsdp_testing.ranks.pool.hygiene_leftovers import thread_count
from fsdp_testing.ranks.pool.jobs import Bootstrap, Failed, Job, Report, StandInRank
from fsdp_testing.ranks.pool.outcome import UNSENT, Dirt, ErrorRecord
from fsdp_testing.ranks.pool.targets import resolve

_flush_c = ctypes.CDLL(None).fflush
_MOST_NEW_THREADS = 64
"""A rank with more threads than this is not lent again. Gloo keeps three for a group that is still referenced, destroyed or not,
and torch never frees a reference cycle through a hook of a parameter."""
_GROWING_OLD_SECONDS = 0.05
RECORDED_COLLECTIVES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
"""How many collectives torch's flight recorder keeps, by its name today and its older one."""
COLLECTIVES_KEPT = 500
"""Torch's own number, 2,000, lets a rank that does nothing else grow by 1.4 % until the recorder is full."""


def main(fds: dict[str, int], modules: frozenset[str]) -> None:
    """Run as a rank.

    Args:
        fds: Inherited descriptors: conn, stdout, stderr, stacks, ledger and, for rank 0, listen.
        modules: What was imported when the rank was forked. Not read from `sys.modules` here: touching each of some thousand
            names would copy its memory page.
    """
    _redirect(fds)
    channel = Channel(socket.socket(fileno=fds["conn"]))
    bootstrap: Bootstrap = channel.receive()
    _adopt(bootstrap)
    measured.start(bootstrap.coverage)
    rank = _Rank(bootstrap, fds, modules)
    try:
        try:
            rank.join()
        except BackendUnavailable as error:
            channel.send(Report(error=ErrorRecord("BackendUnavailable", str(error), str(error))))
            return
        except BaseException as error:  # the controller gets every error
            text = f"the rank could not join its world: {type(error).__name__}: {_text_of(error)}"
            channel.send(Report(error=ErrorRecord("WorldNotJoined", text, traceback.format_exc())))
            return
        channel.send(Report())
        while (job := channel.receive()) is not None:
            report = rank.run(job)
            measured.save()
            channel.send(report)
    except (EOFError, OSError):
        return
    finally:
        measured.stop()
        _flush()


def _redirect(fds: dict[str, int]) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.close(null)
    # A segfault under test is expected: leave no core file.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    for name, number in (("stdout", 1), ("stderr", 2)):
        os.dup2(fds[name], number)
        os.close(fds[name])
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]  # TextIOWrapper at run time
    faulthandler.enable(file=2, all_threads=True)
    # The handler runs in C without the GIL, so it also answers for a rank that is stuck inside an extension.
    faulthandler.register(signal.SIGUSR1, file=fds["stacks"], all_threads=True, chain=False)


def _adopt(bootstrap: Bootstrap) -> None:
    env.restore(bootstrap.environment)
    sys.path[:] = bootstrap.sys_path
    sys.argv[:] = bootstrap.argv
    with contextlib.suppress(OSError):
        os.chdir(bootstrap.directory)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(Exception):
            if stream is not None:
                stream.flush()


class _Rank:
    def __init__(self, bootstrap: Bootstrap, fds: dict[str, int], modules: frozenset[str]) -> None:
        self._bootstrap = bootstrap
        self._listen = fds.get("listen")
        self._ledger_fd = fds["ledger"]
        self._store_fd = fds.get("store")
        self._modules = modules
        self._recorder: Any = None
        self._device = "cpu"
        self._store: Any = None
        self._pid = os.getpid()
        self._threads = 0

    def join(self) -> None:
        """Make the process group, the world and the ledger of this rank."""
        import torch

        from fsdp_testing.base.backends import RankPlace, backend_named
        from fsdp_testing.ranks.ledger import interception
        from fsdp_testing.ranks.ledger.recorder import Recorder
        from fsdp_testing.ranks.pool.hygiene_settings import EXIT_HANDLERS

        boot = self._bootstrap
        torch.set_num_threads(1)
        backend = backend_named(boot.backend)
        reason = backend.unavailable(boot.ranks_here or boot.size)
        if reason is not None:
            raise BackendUnavailable(f"backend {boot.backend!r} cannot run a world of {boot.size} here: {reason}.")
        devices = backend.device_count() if backend.device_count is not None else 0
        numbers = boot.devices or range(max(1, devices))
        index = numbers[boot.rank % len(numbers)]
        rank_place = RankPlace(boot.rank, boot.size, index)
        if backend.prepare is not None:
            backend.prepare(rank_place)
        self._init_group(rank_place.rank, rank_place.size)
        memory = LedgerMemory(self._ledger_fd, 1 if backend.single_process else boot.size)
        self._recorder = Recorder(memory, boot.rank, compare=backend.makes_group and not backend.single_process)
        interception.activate(self._recorder)
        EXIT_HANDLERS.watch()
        device = backend.device_type if backend.device_type == "cpu" else f"{backend.device_type}:{index}"
        self._device = device
        world_place.enter(world_place.World(boot.rank, boot.size, boot.backend, device, pooled=True))
        self._threads = thread_count()

    def _init_group(self, rank: int, size: int) -> None:
        import torch.distributed as dist

        from fsdp_testing.base.backends import backend_named

        backend = backend_named(self._bootstrap.backend)
        if backend.single_process:
            from fsdp_testing.base.compat import fake_store

            dist.init_process_group(backend.torch_backend, store=fake_store(), rank=rank, world_size=size)
            return
        if env.get("GLOO_SOCKET_IFNAME") is None and self._bootstrap.interface:
            env.update({"GLOO_SOCKET_IFNAME": self._bootstrap.interface})
        if not any(map(env.get, RECORDED_COLLECTIVES)):
            # Before the first group: torch reads it once, when it makes the recorder.
            env.update({RECORDED_COLLECTIVES[0]: str(COLLECTIVES_KEPT)})
        if self._store_fd is not None:
            # Kept: torch's C++ code calls it for as long as there are groups.
            self._store = self._private_store(self._store_fd, backend.torch_backend, size)
            dist.init_process_group(backend.torch_backend, store=self._store, rank=rank, world_size=size)
            return
        host, port = self._bootstrap.store_host, self._bootstrap.store_port
        if not backend.makes_group:
            env.update(env.as_launched(rank, size, host, port))
            if self._listen is None:
                return
        listen = {} if self._listen is None else {"master_listen_fd": self._listen}
        store = dist.TCPStore(
            host,
            port,
            world_size=size,
            is_master=rank == 0,
            wait_for_workers=False,
            # Code that makes a store at MASTER_PORT finds this one, in the same process, instead of a port in use.
            multi_tenant=not backend.makes_group,
            **listen,  # type: ignore[arg-type]  # one keyword of an untyped pybind constructor
        )
        if backend.makes_group:
            dist.init_process_group(backend.torch_backend, store=store, rank=rank, world_size=size)
        else:
            self._store = store

    @staticmethod
    def _private_store(descriptor: int, backend: str, size: int) -> Any:
        if backend != "gloo":
            import torch.distributed as dist

            # Other backends have threads that look into the store, and they must not wait for Python's lock.
            return dist.FileStore(f"/proc/self/fd/{descriptor}", size)
        from fsdp_testing.ranks.pool.private_store import PrivateStore

        return PrivateStore(descriptor)

    def _move(self, place: StandInRank) -> None:
        current = world_place.current_world()
        if (current.rank, current.size) == (place.rank, place.size):
            return
        import torch.distributed as dist

        from fsdp_testing.ranks.ledger import interception

        dist.destroy_process_group()
        self._init_group(place.rank, place.size)
        interception.forget_groups()
        world_place.enter(world_place.World(place.rank, place.size, current.backend, self._device, pooled=True))

    def run(self, job: Job) -> Report:
        """Run one job: clean state before, call, restore state, report."""
        from fsdp_testing.ranks.ledger import interception
        from fsdp_testing.ranks.pool.hygiene import take_snapshot

        # Before the snapshot: the controller's changes are no leaks of this call.
        self._follow(job)
        if job.place is not None:
            self._move(job.place)
        # Before the call starts: from now on peers find this rank in the job, and its numbers begin at 1.
        self._recorder.start_job(job.number)
        snapshot = None if job.lasting is None else take_snapshot(ignore=job.lasting)
        started = time.perf_counter()
        payload, failed, problem = _call(job)
        if os.getpid() != self._pid:
            # A child that the call forked has come out of it; its report would be taken for the rank's. Who waits for it
            # learns how it ended.
            _flush()
            if problem is not None:
                os.write(2, problem.traceback.encode())
            os._exit(1 if failed else 0)
        seconds = time.perf_counter() - started
        # Before cleaning up: the rank that ended first leads the account.
        finished = time.monotonic()
        # Before the report: on its arrival the controller reads the output, including C's buffers.
        _flush_c(None)
        _flush()
        # What the call left for the collector may end this rank, and must not end a later call. A whole collection takes
        # milliseconds: as long as a short call, in which no object grows old.
        gc.collect(1 if seconds < _GROWING_OLD_SECONDS else 2)
        dirt = () if snapshot is None else _restored(snapshot)
        interception.forget_groups()
        return Report(
            number=job.number,
            payload=payload,
            failed=failed,
            error=problem,
            dirt=dirt,
            seconds=seconds,
            finished_at=finished,
            new_modules=self._new_modules(),
            worn=thread_count() > self._threads + _MOST_NEW_THREADS,
        )

    def _follow(self, job: Job) -> None:
        """Take over what has changed in the controller since the last job."""
        if job.sys_path is not None:
            sys.path[:] = job.sys_path
        if job.environment is not None:
            env.update(job.environment)
        if job.directory is not None:
            with contextlib.suppress(OSError):
                os.chdir(job.directory)

    def _new_modules(self) -> tuple[str, ...]:
        if len(sys.modules) == len(self._modules):
            return ()
        new = tuple(name for name in sys.modules if name not in self._modules)
        self._modules = frozenset(sys.modules)
        return new


def _call(job: Job) -> tuple[bytes, bool, ErrorRecord | None]:
    """Return payload, whether it failed, and the error of the call."""
    try:
        function = resolve(job.target)
        args, kwargs = loads(job.arguments)
        value = function(*args, **kwargs)
        if unreached := end_all():
            raise HarnessError(never_reached(unreached))
    except BaseException as error:  # also SystemExit and KeyboardInterrupt are the call's end, not the rank's
        end_all()
        return b"", True, _record_of(error)
    failed = isinstance(value, Failed)
    try:
        return dumps(value.value if isinstance(value, Failed) else value), failed, None
    except Exception as error:  # the value's own reduction may raise anything
        note = TypeError(
            f"{job.target} returned a {type(value).__name__} that {UNSENT} "
            f"({type(error).__name__}: {_text_of(error)}). Return plain data and tensors."
        )
        return b"", True, _record_of(note)


def _restored(snapshot: Any) -> tuple[Dirt, ...]:
    try:
        return tuple(snapshot.restore())
    except Exception as error:  # the call left the rank in a state that cannot even be examined
        return (
            Dirt("rank", f"its state cannot be examined: {type(error).__name__}: {_text_of(error)}", restored=False),
        )


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as problem:  # an exception's own text is the test's code
        return f"<str() of it raised {type(problem).__name__}>"


def _record_of(error: BaseException) -> ErrorRecord:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    return ErrorRecord(type(error).__name__, _text_of(error), text.encode("utf-8", "backslashreplace").decode())
