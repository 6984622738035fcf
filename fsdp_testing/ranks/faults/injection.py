"""Injects faults into this rank.

Without faults nothing is installed. A fault replaces the ledger's recorder, methods of torch's groups, a hook of optimizers,
`torch.save` and `torch.load` until the injection ends.
"""

from __future__ import annotations

import errno
import io
import os
import resource
import signal
import struct
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from fsdp_testing.base import measured
from fsdp_testing.errors import HarnessError
from fsdp_testing.ranks.faults.fault import (
    FIRST,
    MARK,
    NOT_ISSUED,
    OF_CALLS,
    Fault,
    active,
    check_together,
    never_reached,
)

if TYPE_CHECKING:
    from fsdp_testing.ranks.ledger.recorder import Line
    from fsdp_testing.ranks.ledger.records import Call


def inject(faults: Iterable[Fault], rank: int) -> Injection:
    """Inject this rank's faults among these, from now until the injection, the test or the job ends.

    Raises:
        InvalidArgument: Two of them cannot both happen.
    """
    faults = list(faults)
    check_together(faults)
    injection = Injection([fault for fault in faults if fault.rank in (None, rank)])
    active.append(injection)
    injection.begin()
    return injection


class _Delivering(threading.local):
    """True while this thread issues a collective that was held back: it was counted where the program called it."""

    now: bool = False


_delivering = _Delivering()


class Injection(AbstractContextManager["Injection"]):
    """The faults of one rank while they last; as a context manager it ends with the context, else with the test or job."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._faults = faults
        self._seen: Counter[str] = Counter()
        self._reached: set[int] = set()
        self._held: list[tuple[Fault, Callable[[], Any]]] = []
        self._of_disk: list[Fault] = []  # each counts as reached when a save or a load meets it
        self._stack = ExitStack()

    def begin(self) -> None:
        """Install what the faults need, and inject those without a place."""
        places = {fault.place for fault in self._faults}
        kinds = {fault.kind for fault in self._faults}
        if "collective" in places:
            self._watch_collectives(calls=bool(kinds & {*OF_CALLS}))
        if "step" in places:
            from fsdp_testing.ranks.faults.steps import at_each_step

            self._stack.enter_context(at_each_step(self._step))
        if places & {"save", "load"} or kinds & {"slow-disk", "full-disk"}:
            self._watch_files()
        for fault in self._faults:
            if not fault.place:
                self._come_about(fault, "from the beginning")

    def end(self) -> list[Fault]:
        """Put everything back, and return the faults that were not reached."""
        if self not in active:
            return []
        active.remove(self)
        self._stack.close()
        import torch.distributed as dist

        for _, issue in self._held if dist.is_initialized() else ():
            _deliver(issue)  # no collective was issued before it, and its peers wait
        return [fault for number, fault in enumerate(self._faults) if number not in self._reached]

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        unreached = self.end()
        if unreached and kind is None:
            raise HarnessError(never_reached(unreached))

    # -------------------------------------------------------------------------------------------- injection

    def _due(self, place: str) -> list[Fault]:
        """Return the faults at the next of these places."""
        number = self._seen[place] + FIRST[place]
        return [fault for fault in self._faults if (fault.place, fault.at) == (place, number)]

    def come_to(self, place: str, what: str) -> None:
        """Count the next of these places."""
        faults = self._due(place)
        self._seen[place] += 1
        for fault in faults:
            if fault.kind != "reorder":  # happens with the collective that is issued before this one
                self._come_about(fault, f"{what} #{fault.at}" if place != "step" else f"before step {fault.at}")

    def _note(self, fault: Fault, where: str) -> None:
        self._reached.update(number for number, other in enumerate(self._faults) if other is fault)
        # On the descriptor: the rank may die a moment later, and its code may have replaced the stream object.
        os.write(2, f"{MARK} {fault.text} is here: {where}\n".encode())

    def _come_about(self, fault: Fault, where: str) -> None:
        if fault.kind in ("slow-disk", "full-disk"):
            self._of_disk.append(fault)
            return
        self._note(fault, where)
        match fault.kind:
            case "crash":
                measured.save()
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "hang":
                threading.Event().wait()
            case "delay":
                time.sleep(fault.value)
            case "memory":
                self._limit_memory(int(fault.value))
            case "clock":
                self._move_clock(fault.value)

    def _limit_memory(self, more: int) -> None:
        used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        limits = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + more, limits[1]))
        self._stack.callback(resource.setrlimit, resource.RLIMIT_AS, limits)

    def _move_clock(self, seconds: float) -> None:
        def moved(clock: Callable[[], float], by: float) -> float:
            return clock() + by

        for name, by in (("time", seconds), ("time_ns", int(seconds * 1e9))):
            replacement = partial(moved, getattr(time, name), by)
            self._stack.enter_context(mock.patch.object(time, name, replacement))

    # -------------------------------------------------------------------------------------------- steps

    def _step(self, optimizer: Any) -> None:
        for fault in self._due("step"):
            if fault.kind == "corrupt":
                gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
                _corrupt([g.to_local() if hasattr(g, "to_local") else g for g in gradients], fault)
        self.come_to("step", "optimizer step")

    # -------------------------------------------------------------------------------------------- collectives

    def _watch_collectives(self, *, calls: bool) -> None:
        from fsdp_testing.ranks.ledger import interception

        recorder = interception.active_recorder()
        record = recorder.record

        def count(line: Line, call: Call, blocking: bool, attempt: Any = None) -> bool:
            if _delivering.now or not call.moves:
                return record(line, call, blocking, attempt)
            fault = next((fault for fault in self._due("collective") if fault.kind in OF_CALLS), None)
            if attempt is None and fault is not None:
                raise HarnessError(
                    f"fault {fault}: expected a collective that Python calls, got {call.text}, which C++ calls (DDP's reducer, "
                    "DTensor). Name another one, or delay, hang or crash there; corrupt takes a step, too."
                )
            self.come_to("collective", call.text)
            return record(line, call, blocking, attempt)

        self._stack.enter_context(mock.patch.object(recorder, "record", count))
        if calls:
            import torch.distributed as dist

            for name in interception.METHODS.keys() & dist.ProcessGroup.__dict__.keys():
                replacement = self._changed(name, getattr(dist.ProcessGroup, name))
                self._stack.enter_context(mock.patch.object(dist.ProcessGroup, name, replacement))

    def _changed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            if _delivering.now:
                return method(group, *args, **kwargs)
            not_issued = False
            for fault in self._due("collective"):
                if fault.kind == "corrupt":
                    _corrupt(_contribution(name, group, args), fault)
                if fault.kind == "reorder":
                    self._held.append((fault, lambda: method(group, *args, **kwargs)))
                not_issued |= fault.kind in NOT_ISSUED
            if not_issued:
                for injection in active:  # no lower layer sees the call, and each counts what the program calls
                    injection.come_to("collective", name)
                return _nothing_issued(args)
            held, self._held = self._held, []
            for fault, _ in held:
                self._note(fault, f"#{fault.at}, after {name}")
            work = method(group, *args, **kwargs)
            for _, issue in held:
                _deliver(issue)
            return work

        return call

    # -------------------------------------------------------------------------------------------- files

    def _watch_files(self) -> None:
        import torch

        save, load = torch.save, torch.load

        def loading(*args: Any, **kwargs: Any) -> Any:
            self.come_to("load", "load")
            self._be_slow("load")
            return load(*args, **kwargs)

        self._stack.enter_context(mock.patch.object(torch, "load", loading))
        self._stack.enter_context(mock.patch.object(torch, "save", partial(self._save, save)))

    def _be_slow(self, where: str) -> None:
        for fault in self._of_disk:
            if fault.kind == "slow-disk":
                self._note(fault, where)
                time.sleep(fault.value)

    def _save(self, save: Callable[..., None], obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        """Write half, inject the fault, write the rest: a rank that dies in between leaves half a file, as in a real crash."""
        corrupted, buffer = any(fault.kind == "corrupt" for fault in self._due("save")), io.BytesIO()
        save(obj, buffer, *args, **kwargs)
        data = bytearray(buffer.getvalue())
        half = len(data) // 2
        if corrupted:
            place = _byte_in_use(buffer)
            # A byte of 1 may be True, and so is every other byte but 0.
            data[place] = 0 if data[place] == 1 else data[place] ^ 0xFF
        with Path(f).open("wb") if isinstance(f, str | os.PathLike) else nullcontext(f) as file:
            file.write(data[:half])
            file.flush()
            self.come_to("save", "half of save")
            self._be_slow("half of save")
            if full := next((fault for fault in self._of_disk if fault.kind == "full-disk"), None):
                self._note(full, "half of save")
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(getattr(file, "name", "")))
            file.write(data[half:])


def _byte_in_use(saved: io.BytesIO) -> int:
    """Return the place of a byte that every load reads: of the largest tensor; of the pickled objects if there is no tensor.

    The rest of a small file is mostly padding. Numbers are little-endian: the last byte of a number has its sign.
    """
    data = saved.getvalue()
    if not zipfile.is_zipfile(saved):
        return len(data) - 1  # the format before torch 1.6 ends with the last tensor
    members = zipfile.ZipFile(saved).infolist()
    tensors = [member for member in members if "/data/" in member.filename and member.file_size]
    read = max(tensors or [m for m in members if m.filename.endswith("data.pkl")], key=lambda member: member.file_size)
    name, extra = struct.unpack_from("<HH", data, read.header_offset + 26)
    inside = min(read.file_size // 16 * 8 + 7, read.file_size - 1)
    return read.header_offset + 30 + int(name) + int(extra) + inside


def _deliver(issue: Callable[[], Any]) -> None:
    """Issue a collective that was held back, and wait for it."""
    _delivering.now = True
    try:
        if (work := issue()) is not None:
            work.wait()
    finally:
        _delivering.now = False


def _contribution(name: str, group: Any, args: tuple[Any, ...]) -> list[Any]:
    """Return the tensors that this rank gives to a collective, by the arguments of the method of its group."""
    import torch

    root = getattr(args[-1], "rootRank", None) if args else None
    if name in ("broadcast", "scatter") and root != group.rank():
        return []
    given: Any = next(
        (args[place] for place in (1, 0) if len(args) > place and isinstance(args[place], torch.Tensor | list)), []
    )
    flat = [given] if isinstance(given, torch.Tensor) else list(given)
    return [tensor for each in flat for tensor in (each if isinstance(each, list) else [each])]


def _corrupt(tensors: Sequence[Any], fault: Fault) -> None:
    """Add 1 to the first number in memory, without changing the tensor's version."""
    import torch

    tensor = next((tensor for tensor in tensors if tensor.numel()), None)
    if tensor is None:
        raise HarnessError(
            f"fault {fault}: expected numbers that this rank contributes there, got none. Name another place."
        )
    first = tensor.data[(0,) * tensor.dim()]
    if tensor.dtype is torch.bool:
        first.logical_not_()
    else:
        first.add_(1)


def _nothing_issued(args: tuple[Any, ...]) -> Any:
    """Return the work of a collective that is not issued: it completes at once and leaves its outputs as they are."""
    import torch
    import torch.distributed as dist

    class Nothing(dist.Work):
        def wait(self, timeout: Any = None) -> bool:
            return True

        def is_completed(self) -> bool:
            return True

        def get_future(self) -> Any:
            future: Any = torch.futures.Future()
            future.set_result(args[0] if args else None)
            return future

    return Nothing()
