"""Delivers the result of an asynchronous collective only when the caller waits for it.

A collective between processes of one machine often completes before the caller's next line, so code that forgot to wait
computes the right numbers nearly every time. Inside `deliver_late` the backend works on memory of ours. The caller's memory
holds NaN (every bit set) from the call on, and `wait` copies the result there. Code that reads sooner, or never waits, reads
NaN every time.

Only asynchronous collectives of contiguous CPU memory are delivered late. A future delivers when it completes: the backend
calls its callbacks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join

_ALL_BITS = 0xFF
_depth = 0


@contextmanager
def deliver_late() -> Iterator[None]:
    """Deliver results of this process's asynchronous collectives only at their wait.

    Nothing is delivered late outside a rank of a world, where collectives are not intercepted.
    """
    global _depth
    _depth += 1
    try:
        # DDP hands this work object to its reducer, which in C++ cannot wait for one of ours.
        with mock.patch.object(Join, "notify_join_context", staticmethod(partial(_at_once, Join.notify_join_context))):
            yield
    finally:
        _depth -= 1


def _at_once(call: Callable[..., Any], *args: Any) -> Any:
    """Call a function whose collectives are delivered as the backend does."""
    global _depth
    depth, _depth = _depth, 0
    try:
        return call(*args)
    finally:
        _depth = depth


def wanted(name: str) -> bool:
    """Return whether `call_late` must call the method `name` of a group."""
    return _depth > 0 and name in _OUTPUTS


def call_late(name: str, method: Callable[..., Any], group: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the asynchronous `method` on memory of ours; `args` as `torch.distributed` passes them."""
    outputs = _OUTPUTS[name](args)
    if not outputs or not all(map(_can_wait, outputs)):
        return method(group, *args, **kwargs)
    # An in-place reduction or send reads its output too: our memory starts as a copy of it.
    in_place = name in _IN_PLACE
    with torch.no_grad():
        stand_ins = [
            output.detach().clone() if in_place else torch.empty(output.shape, dtype=output.dtype, device="cpu")
            for output in outputs
        ]
    # An input inside the memory of an output (an in-place gather) may be read after that memory was hidden.
    hidden = {output.untyped_storage().data_ptr() for output in outputs}
    given = [_apart(value, hidden) for value in _with_outputs(args, stand_ins)]
    work = method(group, *given, **kwargs)
    if work is None:
        raise RuntimeError(f"{name}: expected a work object of an asynchronous collective, got None")
    # The root of a broadcast may go on reading what it sends.
    reads_on = name == "broadcast" and group.rank() == args[1].rootRank
    return LateWork(work, [Delivery(out, ours, hide=not reads_on) for out, ours in zip(outputs, stand_ins)])


def _first(args: tuple[Any, ...]) -> list[Tensor]:
    return [args[0]]


def _list(args: tuple[Any, ...]) -> list[Tensor]:
    return list(args[0]) if len(args[0]) == 1 else []


def _list_of_lists(args: tuple[Any, ...]) -> list[Tensor]:
    return list(args[0][0]) if len(args[0]) == 1 else []


_OUTPUTS: dict[str, Callable[[tuple[Any, ...]], list[Tensor]]] = {
    "allreduce": _list,
    "broadcast": _list,
    "allgather": _list_of_lists,
    "_allgather_base": _first,
    "all_gather_single": _first,
    "reduce_scatter": _list,
    "_reduce_scatter_base": _first,
    "reduce_scatter_single": _first,
    "alltoall_base": _first,
    "all_to_all_single": _first,
}
_IN_PLACE = frozenset({"allreduce", "broadcast"})


def _with_outputs(args: tuple[Any, ...], outputs: Sequence[Tensor]) -> tuple[Any, ...]:
    """Return the arguments with these outputs instead, in the form that the method takes."""
    given = args[0]
    if isinstance(given, Tensor):
        return (outputs[0], *args[1:])
    if given and isinstance(given[0], Tensor):
        return (list(outputs), *args[1:])
    return ([list(outputs)], *args[1:])


def _apart(value: Any, hidden: set[int]) -> Any:
    """Return an argument with copies of those tensors that lie in hidden storage."""
    if isinstance(value, list):
        return [_apart(each, hidden) for each in value]
    if isinstance(value, Tensor) and value.untyped_storage().data_ptr() in hidden:
        return value.detach().clone()
    return value


def _can_wait(output: Any) -> bool:
    plain = type(output) in (Tensor, torch.nn.Parameter) and output.layout is torch.strided
    if not plain or output.device.type != "cpu" or output.dtype is torch.bool:
        return False
    return bool(output.is_contiguous()) and output.numel() > 0


class Delivery:
    """One result on its way: from our memory to the caller's."""

    def __init__(self, output: Tensor, stand_in: Tensor, *, hide: bool) -> None:
        self.output = output
        self._stand_in: Tensor | None = stand_in
        # Remembered: when the result arrives the output may have new memory, and the old memory a new owner.
        self._address = output.data_ptr()
        if hide:
            # By address: modes that watch operators, and version counters, must not see this copy.
            ctypes.memset(self._address, _ALL_BITS, output.nbytes)

    def finish(self) -> None:
        """Copy the result, once.

        Raises:
            RuntimeError: The output's memory, to which the collective writes, was replaced since the collective began.
        """
        stand_in, self._stand_in = self._stand_in, None
        if stand_in is None:
            return
        if self.output.data_ptr() != self._address:
            raise RuntimeError(
                "asynchronous collective: expected its output to keep its memory until it was waited for, got an "
                "output whose memory was freed. The collective writes into memory that may belong to another tensor by "
                "now: wait for it before its output is freed."
            )
        ctypes.memmove(self._address, stand_in.data_ptr(), stand_in.nbytes)


class LateWork(dist.Work):
    """Stands for the work object of a collective whose result is delivered when it is waited for."""

    def __init__(self, work: Any, deliveries: list[Delivery]) -> None:
        super().__init__()
        self._work = work
        self._deliveries = deliveries

    def _deliver(self) -> None:
        for delivery in self._deliveries:
            delivery.finish()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait, then deliver."""
        done: bool = self._work.wait() if timeout is None else self._work.wait(timeout)
        self._deliver()
        return done

    def synchronize(self) -> None:
        """Deliver if the collective has completed: on the CPU this does not wait."""
        self._work.synchronize()
        self.is_completed()

    def block_current_stream(self) -> None:
        """On the CPU this waits."""
        self._work.wait()
        self._deliver()

    def is_completed(self) -> bool:
        """Return whether the collective has completed; if so, deliver, since the caller may now read the result."""
        done: bool = self._work.is_completed()
        if done:
            self._deliver()
        return done

    def is_success(self) -> bool:
        return bool(self._work.is_success())

    def exception(self) -> Any:
        return self._work.exception()

    def result(self) -> list[Tensor]:
        """Return the outputs, delivered."""
        self._work.wait()
        self._deliver()
        return [delivery.output for delivery in self._deliveries]

    def source_rank(self) -> int:
        return int(self._work.source_rank())

    def get_future(self) -> Any:
        """Return a future of the outputs that delivers when the collective completes."""
        outputs = [delivery.output for delivery in self._deliveries]

        def delivered(future: Any) -> list[Tensor]:
            future.value()  # raises what the collective raised
            self._deliver()
            return outputs

        return self._work.get_future().then(delivered)
