"""The collectives: what is sent, and how.

Every collective of training, summoning and gathered state is issued here. (Elsewhere groups are made, DTensors gather
themselves, and torch's Join and users' hooks communicate.) The algorithm is an object chosen per backend
(:func:`collectives_for`); each call carries the name of the unit that it is for, under which a profiler shows it.

All calls are asynchronous where the backend allows and return a :class:`Pending`; the caller waits for the result as late as
correctness allows. Until then the tensors of the call belong to the communication: do not write to sent tensors, and do not
read received ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_ref import compat
from fsdp_ref.storage.memory import ScratchPool

T = TypeVar("T")
TensorT = TypeVar("TensorT", bound=Tensor)


class Pending(Protocol):
    """A started communication."""

    def wait(self) -> None:
        """Return when the result may be read (on CUDA: by the current stream). Waiting twice is legal."""


class Done:
    """A communication that needed none."""

    def wait(self) -> None:
        """Return at once."""


class Started:
    """A communication, and the remaining work on its result.

    Args:
        work: the communication; some backends leave it out when nothing is to be done.
        then: the remaining work, done once by the first waiter, on its current stream.
    """

    def __init__(self, work: dist.Work | Pending | None, then: Callable[[], object] | None = None) -> None:
        self._work = work
        self._then = then

    def wait(self) -> None:
        """Wait for the work, then do the rest; once."""
        # Taken off first: waiting twice is legal, and what is left writes to tensors that the first waiter may have freed.
        (work, self._work), (then, self._then) = (self._work, None), (self._then, None)
        if work is not None:
            work.wait()
        if then is not None:
            with torch.no_grad():
                then()


class Collectives:
    """The collectives of FSDP over one backend, each by the backend's own operation."""

    def all_gather(self, out: Tensor, shard: Tensor, group: dist.ProcessGroup, unit: str) -> Pending:
        """Fill ``out`` (world size times ``shard``, flat) with every rank's ``shard`` in rank order."""
        with compat.labelled("all_gather", unit):
            return self._all_gather(out, shard, group)

    def reduce_scatter(self, out: Tensor, full: Tensor, group: dist.ProcessGroup, unit: str) -> Pending:
        """Fill ``out`` (flat) with this rank's chunk of the sum over ranks of ``full`` (world size times ``out``)."""
        with compat.labelled("reduce_scatter", unit):
            return self._reduce_scatter(out, full, group)

    def all_reduce(self, tensor: Tensor, group: dist.ProcessGroup, unit: str, op: str = "sum") -> Pending:
        """Replace ``tensor`` by its sum (``op="max"``: its maximum) over the ranks of ``group``."""
        with compat.labelled("all_reduce", unit):
            return self._all_reduce(tensor, group, op)

    def broadcast(self, tensor: Tensor, group_src: int, group: dist.ProcessGroup, unit: str) -> Pending:
        """Replace ``tensor`` by that of rank ``group_src`` (counted in ``group``)."""
        with compat.labelled("broadcast", unit):
            return self._broadcast(tensor, group_src, group)

    def exchange(
        self, out: Tensor, taken: list[int], sent: Tensor, given: list[int], group: dist.ProcessGroup, unit: str
    ) -> Pending:
        """Send each rank its part of the bytes ``sent``, fill ``out`` with what ranks send here, both in rank order.

        ``given`` and ``taken`` say how many bytes go to and come from each rank.
        """
        with compat.labelled("exchange", unit):
            return self._exchange(out, taken, sent, given, group)

    def _exchange(
        self, out: Tensor, taken: list[int], sent: Tensor, given: list[int], group: dist.ProcessGroup
    ) -> Pending:
        # Joined by every rank, also by one that sends and gets nothing: the backend pairs calls by their order alone.
        return Started(dist.all_to_all_single(out, sent, taken, given, group=group, async_op=True))

    def _all_gather(self, out: Tensor, shard: Tensor, group: dist.ProcessGroup) -> Pending:
        # The backend's own: NCCL reads ``shard`` and writes ``out`` on a stream of its own, which waits for the
        # current one.
        return Started(compat.all_gather_flat(out, shard, group))

    def _reduce_scatter(self, out: Tensor, full: Tensor, group: dist.ProcessGroup) -> Pending:
        return Started(compat.reduce_scatter_flat(out, full, group))

    def _all_reduce(self, tensor: Tensor, group: dist.ProcessGroup, op: str) -> Pending:
        # In place: the caller keeps the tensor, and does not read it before the wait.
        reduce_op = dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM
        return Started(dist.all_reduce(tensor, op=reduce_op, group=group, async_op=True))

    def _broadcast(self, tensor: Tensor, group_src: int, group: dist.ProcessGroup) -> Pending:
        # ``group_src`` counts in the group, as its members do; ranks of the world may be others.
        return Started(dist.broadcast(tensor, group=group, group_src=group_src, async_op=True))


class GlooCollectives(Collectives):
    """Gloo between tensors on the host: both directions by direct exchange (``all_to_all``) between each two ranks.

    Gloo runs a reduce-scatter as a whole all-reduce, which moves twice the bytes. Exchanging the chunks and adding
    them locally moves each byte once, and adding in rank order makes the sum the same on every run, whatever the
    timing. Its all-gather passes every byte around a ring; exchanged directly, a large one costs about half the
    processor time on one host (benchmarks/step.py), small ones stay with the ring, which needs no second buffer.
    """

    # Below it the copies cost more than the bytes that the ring passes on.
    EXCHANGE_BYTES = 1 << 16

    def __init__(self) -> None:
        self._scratch = ScratchPool()

    def _reduce_scatter(self, out: Tensor, full: Tensor, group: dist.ProcessGroup) -> Pending:
        if not out.numel():  # a unit without a single element, on every rank alike
            return Done()
        if group.size() == 2:
            return self._sum_with_other(out, full, group)
        # Belongs to the exchange until the wait: only then may another reduction use it.
        received = self._scratch.take(full.numel(), full.dtype, full.device)
        work = dist.all_to_all_single(as_bytes(received), as_bytes(full), group=group, async_op=True)

        def add_in_rank_order() -> None:
            # In rank order, whichever arrived first: the same bits in every run.
            chunks = received.view(-1, out.numel()).unbind(0)
            torch.add(chunks[0], chunks[1], out=out)
            for chunk in chunks[2:]:
                out.add_(chunk)
            self._scratch.give(received)

        return Started(work, add_in_rank_order)

    def _sum_with_other(self, out: Tensor, full: Tensor, group: dist.ProcessGroup) -> Pending:
        """With two ranks, each sends the other's chunk directly to the place of the sum; its own chunk never moves."""
        mine, other = group.rank(), 1 - group.rank()
        # ``full`` is padded to a multiple of the ranks: both chunks have the size of ``out``.
        chunks = full.chunk(2)
        # ``out`` receives the other rank's addend and ``full`` keeps this rank's: both are in use until the wait.
        sizes = [out.nbytes if rank == other else 0 for rank in range(2)]
        work = dist.all_to_all_single(as_bytes(out), as_bytes(chunks[other]), sizes, sizes, group=group, async_op=True)
        # The order of two addends does not matter.
        return Started(work, lambda: out.add_(chunks[mine]))

    def _all_gather(self, out: Tensor, shard: Tensor, group: dist.ProcessGroup) -> Pending:
        size = group.size()
        # Every rank decides alike: shards of one group have one size.
        if shard.nbytes < self.EXCHANGE_BYTES:
            return Started(compat.all_gather_flat(as_bytes(out), as_bytes(shard), group))
        if size == 2:
            return self._gather_from_other(out, shard, group)
        # Every rank gets the same chunk from here, but an exchange reads one chunk per receiver.
        copies = self._scratch.take(out.numel(), shard.dtype, shard.device)
        # Filled on this thread before the issue; given back by the waiter, for until then gloo's threads read it.
        copies.view(size, -1).copy_(shard)
        work = dist.all_to_all_single(as_bytes(out), as_bytes(copies), group=group, async_op=True)
        return Started(work, lambda: self._scratch.give(copies))

    @staticmethod
    def _gather_from_other(out: Tensor, shard: Tensor, group: dist.ProcessGroup) -> Pending:
        """With two ranks, each sends its shard to the other and copies its own: no buffer, no byte sent to itself."""
        mine, other = group.rank(), 1 - group.rank()
        chunks = out.chunk(2)
        sizes = [shard.nbytes if rank == other else 0 for rank in range(2)]
        work = dist.all_to_all_single(
            as_bytes(chunks[other]), as_bytes(shard), sizes, sizes, group=group, async_op=True
        )
        # After the issue, so that it runs while bytes travel; the exchange touches the other half of ``out`` only.
        chunks[mine].copy_(shard)
        return Started(work)


class HostCollectives(Collectives):
    """Gloo for tensors of a device: through buffers on the host.

    Gloo itself takes device tensors for some operations and dtypes only, which ones differs between versions, and it
    copies them to the host too. Here all of them take the way that is used on the CPU. Whatever the current stream did
    to a contribution is waited for when the call is issued; results are copied back when they are waited for, on the
    stream that is current then.
    """

    def __init__(self, on_host: Collectives) -> None:
        self._on_host = on_host

    def _all_gather(self, out: Tensor, shard: Tensor, group: dist.ProcessGroup) -> Pending:
        host = torch.empty(out.shape, dtype=out.dtype)
        # ``host`` lives in the function that copies it back, hence until the first wait.
        return Started(self._on_host._all_gather(host, _on_host(shard), group), lambda: out.copy_(host))

    def _reduce_scatter(self, out: Tensor, full: Tensor, group: dist.ProcessGroup) -> Pending:
        host = torch.empty(out.shape, dtype=out.dtype)
        # ``full`` is copied before this returns, so that its memory may be used again at once; ``host`` lives as
        # above.
        return Started(self._on_host._reduce_scatter(host, _on_host(full), group), lambda: out.copy_(host))

    def _exchange(
        self, out: Tensor, taken: list[int], sent: Tensor, given: list[int], group: dist.ProcessGroup
    ) -> Pending:
        host = torch.empty(out.shape, dtype=out.dtype)
        pending = self._on_host._exchange(host, taken, _on_host(sent), given, group)
        return Started(pending, lambda: out.copy_(host))

    def _all_reduce(self, tensor: Tensor, group: dist.ProcessGroup, op: str) -> Pending:
        host = _on_host(tensor)
        # The copy is reduced; ``tensor`` keeps this rank's own values until the first wait.
        return Started(self._on_host._all_reduce(host, group, op), lambda: tensor.copy_(host))

    def _broadcast(self, tensor: Tensor, group_src: int, group: dist.ProcessGroup) -> Pending:
        host = _on_host(tensor)
        return Started(self._on_host._broadcast(host, group_src, group), lambda: tensor.copy_(host))


def _on_host(tensor: Tensor) -> Tensor:
    """Return a copy on the host, after what the current stream does to ``tensor``."""
    # Blocks the host until the current stream has come here: gloo's threads know nothing of streams.
    return tensor.detach().to("cpu", copy=True)


# One object each for the process, so that all units share one pool of scratch memory.
_plain = Collectives()
_gloo = GlooCollectives()
_gloo_by_host = HostCollectives(_gloo)


def collectives_for(group: dist.ProcessGroup, device: torch.device) -> Collectives:
    """Return the algorithms that suit the backend which ``group`` uses for tensors on ``device``."""
    backend = str(dist.get_backend(group))
    # A group may have a backend for each kind of device: "cpu:gloo,cuda:nccl".
    # NCCL, and what vendors bring, stay as they are: their sums run on the device, in an order of the backend's own.
    if backend != "gloo" and f"{device.type}:gloo" not in backend:
        return _plain
    return _gloo if device.type == "cpu" else _gloo_by_host


def gather_objects(mine: T, group: dist.ProcessGroup) -> list[T]:
    """Return every rank's object, in rank order. All ranks of ``group`` must call; the call waits for them."""
    per_rank: list[T] = [mine] * group.size()
    # Pickles of any size: sizes travel first, and on an accelerator the host waits for both. Not for what each step does.
    dist.all_gather_object(per_rank, mine, group=group)
    return per_rank


def broadcast_object(mine: T, groups: Iterable[dist.ProcessGroup | None]) -> T:
    """Return the object of rank 0 of each group in turn (None: no group). All their ranks must call; the call waits."""
    box = [mine]
    for group in groups:
        # In turn: rank 0 of one group may have the object from the group before.
        if group is not None and group.size() > 1:
            dist.broadcast_object_list(box, group=group, group_src=0)
    return box[0]


def cut_into_buckets(tensors: Iterable[TensorT], max_bytes: int) -> list[list[TensorT]]:
    """Cut tensors, in order, into runs of one dtype and device of at most ``max_bytes``, or of one larger tensor."""
    buckets: list[list[TensorT]] = []
    # One open run per kind, so that kinds which alternate (weights, norms in float32) do not end each other's.
    last: dict[tuple[torch.dtype, torch.device], tuple[list[TensorT], int]] = {}
    for tensor in tensors:
        kind = tensor.dtype, tensor.device
        bucket, size = last.get(kind, ([], max_bytes))
        if size + tensor.nbytes > max_bytes:
            bucket, size = [], 0
            buckets.append(bucket)
        bucket.append(tensor)
        last[kind] = bucket, size + tensor.nbytes
    return buckets


def broadcast_tensors(tensors: Iterable[Tensor], group: dist.ProcessGroup, unit: str) -> None:
    """Give tensors of all ranks the values that rank 0 of the group has.

    Collectives:
        One broadcast per 32 MiB and kind of tensor. All ranks must call, with tensors alike; the call waits.
    """
    for bucket in cut_into_buckets(tensors, 32 * 2**20):
        with torch.no_grad():
            # A copy of at most one bucket beside the tensors themselves; every rank cuts alike, by sizes, dtypes and
            # devices alone.
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            collectives_for(group, flat.device).broadcast(flat, 0, group, unit).wait()
            for tensor, values in zip(bucket, flat.split([tensor.numel() for tensor in bucket])):
                tensor.copy_(values.view_as(tensor))


def as_bytes(flat: Tensor) -> Tensor:
    """Return the bytes of a contiguous flat tensor: moving bytes works for every dtype, also those gloo does not know."""
    # The view shares the memory and not the graph: a collective is no operation that autograd knows.
    flat = flat.detach()
    if flat.numel() == 1 and flat.stride() != (1,):  # one element of a transposed column counts as contiguous, too
        flat = flat.as_strided((1,), (1,))
    return flat.view(torch.uint8)
