"""A replicated module, whose gradients are kept equal on all ranks.

Once at the end of each backward pass, every trainable parameter's accumulated ``.grad`` is replaced by its mean over
the group. Reducing what has accumulated, and not what one backward added, makes every schedule right without
bookkeeping: the mean of (an earlier mean + this rank's new gradient) is (the earlier mean + the mean of the new ones).
So accumulation with and without ``no_sync``, several forwards before several backwards, retained graphs and
reentrant checkpointing (which ends inner passes too) need no special case. The price is that nothing overlaps with the
backward computation; whoever replicates large modules shards them instead.

A parameter that no rank has used keeps its gradient as it is; one that some ranks have used counts as zero elsewhere.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_ref.comm.buckets import cut_into_buckets
from fsdp_ref.comm.collectives import collectives_for
from fsdp_ref.comm.division import DivideFactors, divide
from fsdp_ref.compat import graph_task_id, queue_backward_callback
from fsdp_ref.errors import FsdpRuntimeError, listing
from fsdp_ref.storage.precision import map_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """How a module is replicated.

    Attributes:
        bucket_bytes: gradients are reduced in flat pieces of about this size.
        broadcast_buffers: rank 0's buffers are broadcast before each synchronizing forward in training.
        init_sync: rank 0's parameters and buffers are broadcast before the first forward.
        device_ids: what DistributedDataParallel would be given; None on the CPU.
    """

    bucket_bytes: int = 25 * 2**20
    broadcast_buffers: bool = True
    init_sync: bool = True
    device_ids: tuple[torch.device | int, ...] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaMembers:
    """The parameters and buffers that replication keeps equal, by name below the module."""

    params: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]


class Replica:
    """One replicated module: what belongs to it is read at its first forward, when nested units are known.

    Args:
        module: the replicated module.
        group: ranks that hold a replica each.
        options: see :class:`ReplicaOptions`.
        find_members: returns what belongs to it.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        options: ReplicaOptions,
        find_members: Callable[[nn.Module], ReplicaMembers],
    ) -> None:
        self.module = module
        self.group = group
        self.options = options
        self._find_members = find_members
        self._members: ReplicaMembers | None = None
        self._factors = DivideFactors.for_world(group.size())
        self._sync = True
        self._ran = False
        self._modules: list[nn.Module] = []
        self._looked: list[tuple[int, ...]] | None = None
        self._hooked: set[nn.Parameter] = set()
        self._queued_in = -1

    @property
    def device_ids(self) -> tuple[torch.device | int, ...] | None:
        """Devices as DistributedDataParallel counts them: None on the CPU."""
        return self.options.device_ids

    @property
    def param_names(self) -> list[str]:
        """Names of the replicated parameters, without ignored ones and those of nested units."""
        return list(self.members.params)

    @property
    def members(self) -> ReplicaMembers:
        """What belongs to the replica; fixed when first asked for."""
        if self._members is None:
            self._members = self._find_members(self.module)
        return self._members

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally; the first backward that ends outside reduces all that has accumulated."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def pre_forward(self, module: nn.Module, args: object) -> None:
        """Align replicas before the first forward, buffers before each one, and watch trainable parameters.

        Raises:
            FsdpRuntimeError: There are trainable parameters that were not there when the replica learned what belongs to
                it; all are named.

        Collectives: broadcasts on the group at the first forward, and of buffers whenever gradients are recorded;
        all ranks must run the same forwards.
        """
        del module, args
        if torch.is_grad_enabled():
            self._refuse_changes()
        first, self._ran = not self._ran, True
        if first and self.options.init_sync:
            self._broadcast([*self.members.params.values(), *self.members.buffers.values()])
        elif self.options.broadcast_buffers and self._sync and torch.is_grad_enabled():
            self._broadcast(self.members.buffers.values())
        for param in self.members.params.values():
            # Thawed parameters are noticed here: a hook cannot be put on a frozen one.
            if param.requires_grad and param not in self._hooked:
                self._hooked.add(param)
                param.register_post_accumulate_grad_hook(self._hook())

    def _refuse_changes(self) -> None:
        """Check that what is trained belongs to the replica; while nothing is replaced that is one comparison."""
        if self._looked is not None and self._looked == _looks(self._modules):
            return
        known = set(self.members.params.values())
        late = {name: param for name, param in self._find_members(self.module).params.items() if param not in known}
        trained = [name for name, param in late.items() if param.requires_grad]
        if trained:
            raise FsdpRuntimeError(
                f"forward of the replicated {type(self.module).__name__}: expected the parameters that were there at "
                f"its first forward, got trainable parameters that came later: {listing(trained)}. Replace or add "
                "modules and parameters before the first forward (gradients of later ones are averaged by nobody), "
                "load values into the parameters that are there, or freeze them."
            )
        self._modules = list(self.module.modules())
        # What is frozen now may be trained later.
        self._looked = None if late else _looks(self._modules)

    def post_forward(self, module: nn.Module, args: object, output: object) -> None:
        """Watch the output, so that a rank whose backward reaches no parameter still joins the reduction."""
        del module, args
        if torch.is_grad_enabled():
            map_tensors(output, self._watch)

    def _watch(self, tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            tensor.register_hook(self._hook())
        return tensor

    def _hook(self) -> Callable[[Tensor], None]:
        """Return a hook that does not keep the module alive: the collector sees no cycle that autograd is part of."""
        me = weakref.ref(self)

        def hook(_: Tensor) -> None:
            replica = me()
            if replica is not None:
                replica._reduce_after_backward()

        return hook

    def _reduce_after_backward(self) -> None:
        task = graph_task_id()
        if self._queued_in != task:
            self._queued_in = task
            queue_backward_callback(self._end_of_backward)

    def _end_of_backward(self) -> None:
        self._queued_in = -1
        if self._sync and self.group.size() > 1:
            params = [param for param in self.members.params.values() if param.requires_grad]
            for bucket in cut_into_buckets(params, self.options.bucket_bytes):
                self._reduce(bucket)

    @torch.no_grad()
    def _reduce(self, bucket: list[nn.Parameter]) -> None:
        """Average one bucket: all gradients in one flat tensor, followed by one flag per parameter that has one."""
        present = [param.grad is not None for param in bucket]
        pieces = [torch.zeros_like(param) if param.grad is None else param.grad for param in bucket]
        flat = torch.cat([*(piece.reshape(-1) for piece in pieces), pieces[0].new_tensor(present)])
        numel = flat.numel() - len(bucket)
        grads, flags = flat[:numel], flat[numel:]
        divide(grads, self._factors.before)
        collectives_for(self.group, flat.device).all_reduce(flat, self.group, type(self.module).__name__).wait()
        divide(grads, self._factors.after)
        offset = 0
        for param, used in zip(bucket, flags.tolist(), strict=True):
            mean = grads[offset : offset + param.numel()].view(param.shape)
            offset += param.numel()
            if param.grad is not None:
                param.grad.copy_(mean)
            elif used:
                param.grad = mean.clone()

    @torch.no_grad()
    def _broadcast(self, tensors: Iterable[Tensor]) -> None:
        pending = [
            collectives_for(self.group, tensor.device).broadcast(
                tensor.detach(), 0, self.group, type(self.module).__name__
            )
            for tensor in tensors
            if tensor.numel()
        ]
        for work in pending:
            work.wait()


def _looks(modules: Iterable[nn.Module]) -> list[tuple[int, ...]]:
    """Return which children and parameters modules have; the replica holds both, so that no id is given out again."""
    return [(*map(id, module._modules.values()), *map(id, module._parameters.values())) for module in modules]
