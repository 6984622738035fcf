"""Notes what a rank issues: each operator and collective with the memory that it reads and writes, and freed memory."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from fsdp_testing.base import compat
from fsdp_testing.base.compat import Operator, freed, storage_key, storage_reference
from fsdp_testing.ranks.ledger import interception
from fsdp_testing.ranks.streams.history import (
    HOST,
    Access,
    Allocated,
    Entry,
    EventRecorded,
    EventWaited,
    Freed,
    History,
    Site,
    StreamWaited,
    Work,
    stream_of_group,
)
from fsdp_testing.ranks.streams.regions import Region
from fsdp_testing.ranks.streams.simulated import Device, Event, Stream

_FRAMES = 6
_FULL_SWEEP = 1000
_HERE = str(Path(__file__).parent)
_OURS = Path(__file__).parents[2]
_TORCH = str(Path(torch.__file__).parent)
# Code that passes calls on; a place in it does not tell which code issued the work.
_PASSED_OVER = (
    _HERE,
    *(f"{_OURS}/{room}/" for room in ("train", "ranks/pool")),
    str(Path(interception.__file__).parent),
    compat.__file__,
    "<",
    *(
        f"{_TORCH}/{part}"
        for part in (
            "_ops.py",
            "utils/",
            "autograd/",
            "nn/modules/module.py",
            "_tensor.py",
            "optim/optimizer.py",
            "nn/functional.py",
            "_dynamo/",
            "_compile.py",
            "_library/",
            "distributed/c10d_logger.py",
            "distributed/distributed_c10d.py",
        )
    ),
)
# Operators that make memory without writing it.
_EMPTY = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"})
# Operators that look at no element although their schema does not say so.
_LOOKS_AT_NOTHING = frozenset({"_unsafe_view", "_reshape_alias", "lift_fresh", "record_stream"})
# Operators whose result the host reads: it waits for the current stream.
_HOST_READS = frozenset({"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select"})
# Operators that copy, maybe between the host and a device.
_COPIES = frozenset({"copy_", "_to_copy", "_foreach_copy_"})
# Which arguments of a collective are written and which are read; where one is both, it stands in both.
_COLLECTIVES: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "allreduce_": ((0,), (0,)),
    "allreduce_coalesced_": ((0,), (0,)),
    "broadcast_": ((0,), (0,)),
    "reduce_": ((0,), (0,)),
    "allgather_": ((0,), (1,)),
    "_allgather_base_": ((0,), (1,)),
    "allgather_coalesced_": ((0,), (1,)),
    "allgather_into_tensor_coalesced_": ((0,), (1,)),
    "reduce_scatter_": ((0,), (1,)),
    "_reduce_scatter_base_": ((0,), (1,)),
    "reduce_scatter_tensor_coalesced_": ((0,), (1,)),
    "gather_": ((0,), (1,)),
    "gather_into_tensor_": ((0,), (1,)),
    "scatter_": ((0,), (1,)),
    "alltoall_": ((0,), (1,)),
    "alltoall_base_": ((0,), (1,)),
    "send": ((), (0,)),
    "recv_": ((0,), ()),
    "recv_any_source_": ((0,), ()),
}


@dataclass(frozen=True, slots=True)
class _TrackedBlock:
    """Memory in use: its identity, its number in the history and the stream whose pool it comes from."""

    key: int
    number: int
    owner: int


class StreamRecorder(Device):
    """The device of an observed rank: also knows blocks of memory, and collectives that no code has waited for."""

    def __init__(self, history: History, kind: str = "cpu") -> None:
        self._kind = kind
        self._settle = getattr(torch, kind).synchronize
        self._blocks: dict[int, _TrackedBlock] = {}
        self._references: dict[int, Any] = {}
        self._shared: dict[int, Any] = {}  # of blocks that several streams have used
        self._until_full_sweep = _FULL_SWEEP
        self._made = 0
        self._pending: dict[int, tuple[Any, Event]] = {}
        self._results: dict[int, tuple[Event, Sequence[Tensor]]] = {}
        self._of_host: set[int] = set()  # events of collectives between tensors of the host
        self._groups: dict[str, Stream] = {}
        self.caller: Any = None
        self.silent = False
        self.issued: Event | None = None
        super().__init__(history)

    def note(self, entry: Entry) -> None:
        """Add an entry, after noting blocks that were freed before it."""
        self.sweep()
        super().note(entry)

    def sweep(self) -> None:
        """Note the blocks that are no longer referenced.

        For a block that only one stream has used the time of its release does not matter; such blocks are checked now and then.
        """
        self._until_full_sweep -= 1
        references = self._shared
        if self._until_full_sweep <= 0:
            references, self._until_full_sweep = self._references, _FULL_SWEEP
        for key in freed(references):
            self.freed(key)

    def freed(self, key: int) -> None:
        """Note that a block was freed."""
        block = self._blocks.pop(key, None)
        self._references.pop(key, None)
        self._shared.pop(key, None)
        if block is not None:
            self.history.entries.append(Freed(block.number, _site()))

    def close(self) -> None:
        """Forget the blocks still held; their release does not matter."""
        self._until_full_sweep = 0
        self.sweep()
        for kept in (self._pending, self._blocks, self._references, self._shared):
            kept.clear()

    def block(self, tensor: Tensor, made: bool = False) -> _TrackedBlock:
        """Return the block that a tensor lies in; a new block begins on the current stream if the tensor was `made` just now."""
        storage = tensor.untyped_storage()
        key = storage_key(storage)
        block = self._blocks.get(key)
        if block is None:
            owner = HOST if self.on_host(tensor) else self.current.number if made else self.default.number
            self._made += 1
            block = self._blocks[key] = _TrackedBlock(key, self._made, owner)
            self._references[key] = storage_reference(storage)
            shape = "x".join(map(str, tensor.shape)) or "one"
            label = f"a tensor of {shape} {str(tensor.dtype).removeprefix('torch.')}"
            self.history.entries.append(Allocated(block.number, owner, label))
        return block

    def settle(self) -> None:
        """Really wait for the device: the host may next read anything that it waited for."""
        if self._kind != "cpu":
            self._settle()

    def on_host(self, tensor: Tensor) -> bool:
        """Whether a tensor is in memory of the host, and the observed device is another one."""
        return self._kind != "cpu" and tensor.device.type == "cpu"

    def operator(self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor], *, copies: bool) -> None:
        """Note an operator, on the current stream; what it reads and writes on the host, the host does unless it `copies`."""
        mixed = [tensor for tensor in (*reads, *writes) if self.on_host(tensor)]
        if not mixed or (copies and len(mixed) < len(reads) + len(writes)):
            self.work(name, self.current.number, reads, writes)
            return
        for stream, here in ((HOST, True), (self.current.number, False)):
            parts = [[tensor for tensor in part if self.on_host(tensor) is here] for part in (reads, writes)]
            self.work(name, stream, *parts)

    def work(self, name: str, stream: int, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """Note a piece of work."""
        accesses: list[Access] = []
        for tensor, writing in [(each, False) for each in reads] + [(each, True) for each in writes]:
            # A tensor without elements or memory is not used.
            if tensor.numel() == 0 or tensor.device.type == "meta":
                continue
            block, size = self.block(tensor), tensor.element_size()
            if block.owner != stream:
                self._shared[block.key] = self._references[block.key]
            strides = tuple(stride * size for stride in tensor.stride())
            region = Region(int(tensor.storage_offset()) * size, tuple(tensor.shape), strides, size)
            accesses.append(Access(block.number, region, writing))
        if accesses:
            self.history.entries.append(Work(stream, name, tuple(accesses), _site()))

    def collective(self, name: str, group: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> Event:
        """Note an asynchronous collective and return the event that its waiters wait for."""
        stream = self._groups.get(group)
        if stream is None:
            stream = self._groups[group] = Stream(self, stream_of_group(group))
        if self.issuer([*reads, *writes]) != HOST:  # what the host did comes before anything that it issues
            self.note(StreamWaited(stream.number, self.current.number))
        self.work(name, stream.number, reads, writes)
        event = Event(self)
        self.note(EventRecorded(event.number, stream.number))
        if self.issuer([*reads, *writes]) == HOST:
            self._of_host.add(event.number)
        return event

    def issuer(self, tensors: Sequence[Tensor]) -> int:
        """Return the issuer of a collective of these tensors, which also waits for it: the host for the host's own tensors."""
        return HOST if tensors and all(map(self.on_host, tensors)) else self.current.number

    def pend(self, work: Any, event: Event) -> None:
        """Remember that waiting for `work` means waiting for `event`; the work holds its tensors until then."""
        self._pending[id(work)] = (work, event)

    def waited(self, work: Any) -> None:
        """Make the current stream wait for a collective."""
        pending = self._pending.pop(id(work), None)
        if pending is not None:
            self.note(
                EventWaited(pending[1].number, HOST if pending[1].number in self._of_host else self.current.number)
            )

    def functional(self, name: str, group: str, reads: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Note a functional collective; `wait_tensor` of a result waits for it, and until then it holds what it reads."""
        event = self.collective(name, group, reads, results)
        for result in results:
            self._results[self.block(result).number] = event, reads

    def wait_tensor(self, tensor: Tensor) -> None:
        """Make the current stream wait for the functional collective that a tensor comes from."""
        issued = self._results.pop(self.block(tensor).number, None)
        if issued is not None:
            self.note(EventWaited(issued[0].number, self.current.number))


def run_noted(recorder: StreamRecorder, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator, and note what it reads and writes."""
    if recorder.silent:
        return operator.call(*args, **kwargs)
    recorder.sweep()
    if operator.namespace == "c10d":
        result = operator.call(*args, **kwargs)
        _note_collective(recorder, operator, args, kwargs)
        return result
    if operator.namespace == "_c10d_functional":
        return _functional(recorder, operator, args, kwargs)
    # Inputs first: memory whose last reference is the operator's is noted before it may be freed.
    reads, writes = _touched(operator, args, kwargs)
    arguments = {_key(tensor) for tensor in _tensors((args, kwargs))}
    for tensor in (*reads, *writes):
        recorder.block(tensor)
    result = operator.call(*args, **kwargs)
    if operator.name == "lift_fresh":
        recorder.block(result, made=True)  # of `torch.tensor`, which has just made it unseen
    made = [each for each in _tensors(result) if each.numel() and _key(each) not in arguments]
    for tensor in made:
        recorder.block(tensor, made=True)
    idle = operator.is_view and not made and not writes
    if not idle and operator.name not in _EMPTY and operator.name not in _LOOKS_AT_NOTHING:
        recorder.operator(operator.name, reads, [*writes, *made], copies=operator.name in _COPIES)
    if _host_waits(recorder, operator, args, kwargs, [*reads, *writes, *made]):
        recorder.current.synchronize()
    return result


def _host_waits(
    recorder: StreamRecorder, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], used: Sequence[Tensor]
) -> bool:
    """Whether the host waits for the current stream: it reads a value, or a copy between it and the device blocks it."""
    here = [tensor for tensor in used if recorder.on_host(tensor)]
    if operator.name in _HOST_READS:
        return len(here) < len(used)
    if operator.name not in _COPIES or not 0 < len(here) < len(used):
        return False
    place = next(place for place, (name, _, _) in enumerate(operator.arguments) if name == "non_blocking")
    if not (args[place] if place < len(args) else kwargs.get("non_blocking", False)):
        return True
    recorder.silent = True
    try:
        return not all(tensor.is_pinned() for tensor in here)
    finally:
        recorder.silent = False


def _note_collective(
    recorder: StreamRecorder, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    if operator.name not in _COLLECTIVES:
        return
    written, read = _COLLECTIVES[operator.name]
    names = [name for name, _, _ in operator.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    writes = [tensor for place in written for tensor in _tensors(given.get(names[place]))]
    reads = [tensor for place in read for tensor in _tensors(given.get(names[place]))]
    if recorder.caller is None or not given.get("async_op", given.get("asyncOp", True)):
        recorder.work(operator.name, recorder.issuer([*reads, *writes]), reads, writes)
    else:
        recorder.issued = recorder.collective(operator.name, recorder.caller.group_name, reads, writes)


def _functional(recorder: StreamRecorder, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    reads = _tensors((args, kwargs))
    result = operator.call(*args, **kwargs)
    if operator.name in ("wait_tensor", "wait_tensors"):  # the second since torch 2.15
        for tensor in reads:
            recorder.wait_tensor(tensor)
    elif not operator.name.startswith("_"):
        recorder.functional(operator.name, args[-1], reads, _tensors(result))
    return result


def _touched(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Return which tensors among the arguments an operator reads and which it writes."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for place, (name, written, shared) in enumerate(operator.arguments):
        tensors = _tensors(args[place] if place < len(args) else kwargs.get(name))
        if written:
            writes += tensors
        elif not shared:  # an argument that is only shared is not read: the operator is a view
            reads += tensors
    return reads, writes


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.layout is torch.strided else []
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    # Most parts are tensors or plain values: no call for each of these.
    tensors: list[Tensor] = []
    for each in value:
        if isinstance(each, (Tensor, list, tuple, dict)):
            tensors += _tensors(each)
    return tensors


def _key(tensor: Tensor) -> int:
    return storage_key(tensor.untyped_storage())


def _site() -> Site:
    places: list[str] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None and len(places) < _FRAMES:
        place = _place(frame.f_code, frame.f_lineno)
        if place:
            places.append(place)
        frame = frame.f_back
    return tuple(places)


@functools.cache
def _place(code: CodeType, line: int) -> str:
    """Return a place as text; empty for code that passes calls on. Called for each frame of each operator."""
    passed_over = code.co_filename.startswith(_PASSED_OVER)
    return "" if passed_over else f"{code.co_filename}:{line} in {code.co_qualname}"
