"""Finds what a job leaked: threads, child processes, open files, temporary files.

Everything compared before and after a job is a `Probe`: how to read it, name a change, and restore it. Nearly all are
settings, which have a value, or things that a job may add.

Imports no torch: the fork server, and with it the controller, asks for `children`.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fsdp_testing.base.compat import tracker_pipe

Reader = Callable[[], Any]
Describe = Callable[[Any, Any], Iterator[str]]
Putting = Callable[[Any, Any], None]


@dataclass(frozen=True, slots=True)
class Probe:
    """One thing that is compared before and after a job.

    Attributes:
        kind: Word for it in a report.
        read: Returns a value that `==` compares; costs microseconds, since every job pays for it twice.
        put_back: Called with (before, now); None when only a new process has the earlier state.
        describe: Called with (before, now); yields one text for each difference.
        collect_first: Whether uncollected garbage may look like a leak. If so, garbage is collected and the value read again
            before a report.
    """

    kind: str
    read: Reader
    put_back: Putting | None = None
    describe: Describe = lambda before, now: iter([f"{before!r} -> {now!r}"])
    collect_first: bool = False


@dataclass(frozen=True, slots=True)
class Setting:
    """A named value with a getter and, where it can be set, a setter."""

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], Any] | None = None


def attribute(owner: Any, name: str, label: str = "") -> Setting:
    """Return a setting for an attribute of a module, class or object."""
    label = label or f"{getattr(owner, '__name__', type(owner).__name__)}.{name}"
    return Setting(label, lambda: getattr(owner, name), lambda value: setattr(owner, name, value))


def list_attribute(owner: Any, name: str, label: str = "") -> Setting:
    """Return a setting for the contents of a list; restoring it keeps the list itself."""
    label = label or f"{owner.__name__}.{name}"
    return Setting(
        label, lambda: list(getattr(owner, name)), lambda value: getattr(owner, name).__setitem__(slice(None), value)
    )


def settings_probe(kind: str, settings: Sequence[Setting]) -> Probe:
    """Return one probe over several settings: read together, named and restored one by one."""
    getters = tuple(setting.get for setting in settings)

    def changed(before: list[Any], now: list[Any]) -> Iterator[tuple[Setting, Any, Any]]:
        return ((s, old, new) for s, old, new in zip(settings, before, now, strict=True) if old != new)

    def describe(before: list[Any], now: list[Any]) -> Iterator[str]:
        return (f"{setting.name}: {_change(old, new)}" for setting, old, new in changed(before, now))

    def put_back(before: list[Any], now: list[Any]) -> None:
        for setting, old, _ in changed(before, now):
            if setting.set is not None:
                setting.set(old)

    return Probe(kind, lambda: [get() for get in getters], put_back, describe)


def _change(old: Any, new: Any) -> str:
    if not isinstance(old, list):
        return " -> ".join(text if len(text) <= 80 else text[:77] + "..." for text in (repr(old), repr(new)))
    added, removed = [entry for entry in new if entry not in old], [entry for entry in old if entry not in new]
    return f"added {added}, removed {removed}" if added or removed else "reordered"


def leftovers_probe(
    kind: str,
    read: Callable[[], Sequence[Any]],
    name: Callable[[Any], str],
    remove: Callable[[Any], object] | None = None,
    *,
    lost: str = "",
    collect_first: bool = False,
) -> Probe:
    """Return a probe over things that a job may leak.

    Args:
        kind: As in `Probe`.
        read: Returns all there are now.
        name: Describes one thing; empty if it may stay.
        remove: Ends one thing; None when only a new process is free of it.
        lost: What to say about a lost thing; empty when a loss is not reported.
        collect_first: As in `Probe`.
    """

    def describe(before: Sequence[Any], now: Sequence[Any]) -> Iterator[str]:
        yield from filter(None, (name(thing) for thing in now if thing not in before))
        yield from (lost for thing in before if lost and thing not in now)

    def put_back(before: Sequence[Any], now: Sequence[Any]) -> None:
        for thing in now:
            if remove is not None and thing not in before and name(thing):
                remove(thing)

    return Probe(kind, read, put_back if remove is not None else None, describe, collect_first)


# A thread that was asked to stop has this long before it counts as leaked.
_THREAD_GRACE_SECONDS = 0.2
# On a busy machine a thread may be about to stop and get no turn.
_THREAD_LATE_SECONDS = 5.0
# The moment in which a new process has neither its parent's command line nor its own.
_EXEC_SECONDS = 0.1
# Made once per process by the standard library for as long as it lives.
_LASTING_CHILDREN = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
# torch.compile keeps these caches between processes on purpose.
_LASTING_FILES = ("torchinductor_",)
_LIMITS = ("AS", "CORE", "CPU", "DATA", "FSIZE", "MEMLOCK", "NOFILE", "NPROC", "STACK")
# This many descriptors are named one by one; libraries may keep this many of devices, events and memory for good.
_NAMED = 10
_KEPT_DESCRIPTORS = 64


class PrivateTemporaryDirectory:
    """The rank's own directory for temporary files, so that any file left in it is this rank's."""

    def __init__(self) -> None:
        self.path: Path | None = None

    def use(self, path: Path) -> None:
        """Make `path` the directory of `tempfile` in this process."""
        self.path = path
        tempfile.tempdir = str(path)


TEMPORARY = PrivateTemporaryDirectory()


def _running(thread: threading.Thread) -> str:
    limit = time.monotonic() + _THREAD_LATE_SECONDS
    thread.join(_THREAD_GRACE_SECONDS)
    while thread.is_alive() and _wants_to_run(thread) and time.monotonic() < limit:
        thread.join(_THREAD_GRACE_SECONDS)
    if not thread.is_alive():
        return ""
    target = getattr(thread, "_target", None) or type(thread).run
    daemon = " (daemon)" if thread.daemon else ""
    return f"thread {thread.name!r}{daemon} still runs {getattr(target, '__qualname__', repr(target))}"


def _wants_to_run(thread: threading.Thread) -> bool:
    try:
        state = Path(f"/proc/self/task/{thread.native_id}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return state.rpartition(")")[2].split()[0] == "R"


def thread_count() -> int:
    """Return the threads of this process, including those unknown to Python."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:  # no /proc, or no descriptor is left to read it by
        return 1


def children() -> list[int]:
    """Return the child processes of this process, including ended ones that were not waited for."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return []
    pids: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        try:
            pids.extend(int(pid) for pid in (task / "children").read_text(encoding="ascii").split())
        except OSError:
            continue  # the thread ended between the listing and the reading
    return sorted(pids)


def _child(pid: int) -> str:
    command = _command(pid)
    if any(name in command for name in _LASTING_CHILDREN):
        return ""
    return f"child process {pid} ({command or 'ended, but was not waited for'})"


def _command(pid: int) -> str:
    """Return the command line of a process; empty for one that has ended."""
    limit = time.monotonic() + _EXEC_SECONDS
    while True:
        try:
            raw = Path(f"/proc/{pid}/cmdline").read_bytes()
            state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
        except OSError:
            return ""
        # A process that is just being replaced by another program has no command line for a moment.
        if raw or state.split()[0] == "Z" or time.monotonic() > limit:
            return raw.replace(b"\0", b" ").decode("utf-8", "replace").strip()
        os.sched_yield()


def _end(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        return  # it had ended, or other code waited for it


def _descriptors() -> list[str]:
    try:
        numbers = os.listdir("/proc/self/fd")
    except OSError:  # no descriptor is left to read the folder with
        return [str(number) for number in range(resource.getrlimit(resource.RLIMIT_NOFILE)[0]) if _is_open(number)]
    # The listing itself held the lowest free number, which the next file opened will get.
    lowest_free = os.dup(2)
    os.close(lowest_free)
    own = str(lowest_free)
    return [number for number in numbers if number != own]


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _tell_descriptors(before: Sequence[str], now: Sequence[str]) -> Iterator[str]:
    new = sorted(set(now) - set(before), key=int)
    named = list(filter(None, map(_descriptor, new)))
    # Separate: process groups hold sockets, whose names end in a bracket.
    sockets = [text for text in named if text.endswith("]")]
    for texts, ending in (
        ([text for text in named if text not in sockets], "on files"),
        (sockets, "on [sockets or pipes]"),
    ):
        yield from texts[:_NAMED]
        if len(texts) > _NAMED:
            yield f"{len(texts) - _NAMED} more descriptors are open {ending}"
    if len(new) - len(named) > _KEPT_DESCRIPTORS:
        yield f"{len(new) - len(named)} descriptors of devices, events or memory are open"


def _descriptor(number: str) -> str:
    """Return what an open descriptor leads to; empty if it is closed or a library keeps it for good."""
    try:
        kind = os.fstat(int(number)).st_mode
        name = str(Path(f"/proc/self/fd/{number}").readlink())
    except OSError:
        return ""
    lasting = name.startswith(("/dev/", "/proc/", "/sys/", "anon_inode:", "/memfd:")) or int(number) == tracker_pipe()
    return "" if lasting or stat.S_ISCHR(kind) else f"descriptor {number} is open on {name}"


def _temporary_files() -> list[str]:
    if TEMPORARY.path is None:
        return []
    try:
        return sorted(os.listdir(TEMPORARY.path))
    except FileNotFoundError:
        return ["(the directory itself was removed)"]


def _remove_file(name: str) -> None:
    if TEMPORARY.path is None:
        return
    path = TEMPORARY.path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _limit(name: str) -> Setting:
    number = getattr(resource, f"RLIMIT_{name}")
    return Setting(f"RLIMIT_{name}", partial(resource.getrlimit, number), partial(resource.setrlimit, number))


LIMITS = settings_probe(
    "process limits",
    [
        *(_limit(name) for name in _LIMITS if hasattr(resource, f"RLIMIT_{name}")),
        Setting("niceness", lambda: os.getpriority(os.PRIO_PROCESS, 0), partial(os.setpriority, os.PRIO_PROCESS, 0)),
        Setting(
            "scheduling policy",
            lambda: os.sched_getscheduler(0),
            lambda policy: os.sched_setscheduler(0, policy, os.sched_param(0)),
        ),
    ],
)

LEFTOVER_PROBES: tuple[Probe, ...] = (
    leftovers_probe("thread", threading.enumerate, _running, collect_first=True),
    leftovers_probe("child process", children, _child, _end),
    Probe("open file", _descriptors, None, _tell_descriptors, collect_first=True),
    leftovers_probe(
        "temporary file",
        _temporary_files,
        lambda name: "" if name.startswith(_LASTING_FILES) else f"{TEMPORARY.path}/{name}",
        _remove_file,
        collect_first=True,
    ),
)
