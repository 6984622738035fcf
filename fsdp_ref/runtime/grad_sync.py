"""Local gradients become the average over ranks.

[Note: division] Gradients are divided before the sum by ``f`` and after it by ``world / f``, with ``f`` near the square
root of the world size, so that neither the addends underflow nor the sum overflows in low precision. The sum runs in
``reduce_dtype``, first over the shard group (each rank keeps its piece), then over the replicate group.

Reductions are asynchronous: the next unit's backward computes while they run. At most :data:`IN_FLIGHT` are open, so
that memory stays bounded; the rest is waited for at the end of backward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_ref.comm.collectives import Collectives, Pending
from fsdp_ref.comm.division import DivideFactors, divide
from fsdp_ref.compat import labelled
from fsdp_ref.handle.accumulated import fill_flat
from fsdp_ref.handle.flat_handle import FlatHandle
from fsdp_ref.runtime.events import UnitEventKind
from fsdp_ref.runtime.guards import Traffic
from fsdp_ref.runtime.unit import Unit
from fsdp_ref.storage.memory import ScratchPool

IN_FLIGHT = 2

SCRATCH = ScratchPool()
"""Buffers that gradients are gathered into before they are sent; shared by all units of this process."""


CASTING_HOOKS: Final[set[Callable[..., Any]]] = set()
"""Users' hooks that cast for themselves: gradients reach them uncast, and their result is taken as it is."""


class _Reduction:
    """One gradient on its way: summed over one group after the other, then divided and added to the others."""

    def __init__(
        self, unit: Unit, used: list[bool], sent: Tensor | None, out_S: Tensor, pending: Pending, after: float
    ) -> None:
        self.unit = unit
        self._used = used
        self._sent = sent
        self._out_S = out_S
        self._pending = pending
        self._after = after
        self._rest: list[dist.ProcessGroup] = []
        self._collectives: Collectives | None = None

    def then_all_reduce(self, collectives: Collectives, groups: Sequence[dist.ProcessGroup]) -> None:
        """Sum over these groups afterwards."""
        self._collectives = collectives
        self._rest = list(groups)

    def advance(self) -> None:
        """Wait for the current sum and start the next, if there is one."""
        if self._rest and self._collectives is not None:
            # The second sum reads what the first one wrote. On a device the stream waits, not the host.
            self._pending.wait()
            group = self._rest.pop(0)
            self._pending = self._collectives.all_reduce(self._out_S, group, self.unit.name)

    def finish(self) -> None:
        """Wait for everything and add the result to the gradient."""
        handle = self.unit.handle
        # On the stream that the sum arrives on, so that compute waits for it once, at the end of backward.
        with handle.streams.post_backward(), torch.no_grad():
            self._wait()
            # Before the division, which may underflow to -0.0 (see [Note: marks of use]).
            uses = handle.grads.uses_in(self._out_S, self._used)
            divide(self._out_S, self._after)
            handle.grads.add_reduced(self._out_S, uses)

    def _wait(self) -> None:
        # The waiter has no work left that could overlap with the remaining sums.
        while self._rest:
            self.advance()
        self._pending.wait()
        if self._sent is not None:
            # The pool is shared by all units. Not before: until the wait the collective reads it.
            SCRATCH.give(self._sent)
            self._sent = None

    def abandon(self) -> None:
        """Wait for everything and drop the result."""
        with self.unit.handle.streams.post_backward():
            self._wait()


class GradSync:
    """The open reductions of one root."""

    def __init__(self) -> None:
        self._open: deque[_Reduction] = deque()

    def accumulate(self, unit: Unit, grads: Sequence[Tensor | None]) -> None:
        """Keep local gradients without reducing them."""
        unit.note(UnitEventKind.ACCUMULATE)
        unit.handle.grads.add_local(grads)

    def reduce(self, unit: Unit, grads: Sequence[Tensor | None]) -> None:
        """Start to reduce local gradients together with those kept before.

        Collectives:
            A reduce-scatter over the shard group (an all-reduce where nothing is sharded), then an all-reduce over
            the replicate group. All of their ranks must call.
        """
        handle = unit.handle
        unit.note(UnitEventKind.REDUCE)
        if unit.root is not None:
            # In the order of issue, which is what ranks compare.
            for look in unit.root.guards.sends:
                look(unit, Traffic.REDUCE)
        streams = handle.streams
        # Gradients were made by kernels of the current stream and are read on the post-backward stream, which therefore
        # waits; autograd frees them when this returns, and the allocator must not hand their memory out before.
        streams.reduce_after_compute()
        for grad in grads:
            if grad is not None:
                streams.used_by_reduce(grad)
        with labelled("post_backward_reduce", unit.name), streams.post_backward(), torch.no_grad():
            if unit.comm_hook is not None:
                self._by_hook(unit, handle, grads)
            else:
                self._built_in(unit, handle, grads)

    def _built_in(self, unit: Unit, handle: FlatHandle, grads: Sequence[Tensor | None]) -> None:
        factors = DivideFactors.for_world(handle.groups.total_size)
        before, after = factors.before, factors.after
        if unit.divide_factor is not None:
            # The first division stays a power of two, whatever the user divides by.
            after = unit.divide_factor / before
        dtype = handle.precision.original if handle.full_precision else handle.precision.reduce
        sent_F, used = gather_local(handle, grads, dtype, before)
        collectives = handle.collectives
        rest = [] if handle.groups.replicate is None else [handle.groups.replicate]
        if handle.sharded:
            out_S = torch.empty(handle.shard_map.shard_numel, dtype=dtype, device=sent_F.device)
            # ``sent_F`` is the collective's until the wait; ``out_S`` nobody reads before, and becomes the gradient itself.
            pending = collectives.reduce_scatter(out_S, sent_F, handle.groups.shard, unit.name)
            reduction = _Reduction(unit, used, sent_F, out_S, pending, after)
        else:
            # NO_SHARD, or a hybrid unit whose shard group has one rank. What is summed in place becomes the gradient: the
            # buffer leaves the pool for good.
            groups = [group for group in (handle.groups.shard, *rest) if group.size() > 1]
            first, rest = groups[0] if groups else handle.groups.shard, groups[1:]
            pending = collectives.all_reduce(sent_F, first, unit.name)
            reduction = _Reduction(unit, used, None, sent_F, pending, after)
        reduction.then_all_reduce(collectives, [group for group in rest if group.size() > 1])
        self._open.append(reduction)
        self._bound()

    def _bound(self) -> None:
        if len(self._open) > 1:
            # By now the sum within the shard group has had a whole unit's backward to end; let that over replicas run.
            self._open[-2].advance()
        # The oldest first: results are added in the order of issue, on every rank alike.
        while len(self._open) > IN_FLIGHT:
            self._open.popleft().finish()

    def _by_hook(self, unit: Unit, handle: FlatHandle, grads: Sequence[Tensor | None]) -> None:
        """Let the user's hook reduce; it divides and communicates as it likes."""
        hook = unit.comm_hook
        assert hook is not None  # the caller looked
        low = hook in CASTING_HOOKS
        dtype = handle.compute_dtype if low or handle.full_precision else handle.precision.reduce
        sent_F, used = gather_local(handle, grads, dtype, 1.0)
        if handle.sharded:
            out_S = torch.zeros(handle.shard_map.shard_numel, dtype=dtype, device=sent_F.device)
            # On the post-backward stream, as ours: what the hook sends queues behind other reductions, in one order on all ranks.
            hook(unit.comm_hook_state, sent_F, out_S)
            # Not given back to the pool: the hook may have kept it.
        else:
            out_S = sent_F
            hook(unit.comm_hook_state, out_S)
        # Casts of a compressing hook may underflow to -0.0 on one rank: all ranks believe the sum.
        uses = handle.grads.uses_in(out_S, [False] * len(used) if low else used)
        handle.grads.add_reduced(out_S, uses)

    def finish(self) -> None:
        """Wait for all open reductions."""
        while self._open:
            self._open.popleft().finish()

    def abandon(self) -> None:
        """Wait for all open reductions and drop their results: the backward pass failed."""
        while self._open:
            self._open.popleft().abandon()


def gather_local(
    handle: FlatHandle, grads: Sequence[Tensor | None], dtype: torch.dtype, divisor: float
) -> tuple[Tensor, list[bool]]:
    """Return what this rank adds to a reduction, and per original whether it has a gradient for it.

    All local gradients as one flat tensor in ``dtype``, divided by ``divisor``, padding zero, uses marked.
    """
    kept_F, used = handle.grads.take_local(grads)
    if kept_F is None:
        flat_F = SCRATCH.take(handle.shard_map.padded_numel, dtype, handle.config.device)
        fill_flat(flat_F, handle.layout, grads, divisor)
    else:
        # Made by kernels of the current stream in an earlier backward; there is no other reference.
        handle.streams.used_by_reduce(kept_F)
        flat_F = kept_F
        if kept_F.dtype != dtype or handle.sharded:
            flat_F = SCRATCH.take(handle.shard_map.padded_numel, dtype, handle.config.device)
            # Kept for several micro-batches in the wider dtype; cast once, here.
            flat_F.copy_(kept_F)
        divide(flat_F, divisor)
    # Last: a cast or a division of the mark itself may lose its sign.
    handle.grads.stamp(flat_F, used)
    return flat_F, used
