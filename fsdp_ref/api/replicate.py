"""``replicate(module)``: keep a module whole on every rank and average its gradients.

Composable with ``fully_shard``: inside a sharded module a replicated subtree is left alone by sharding; units inside a
replicated module are left alone by replication. Source: ``torch.distributed._composable.replicate`` for the surface.

[Note: replicas] Once at the end of each backward pass, every trainable parameter's accumulated ``.grad`` is replaced by its
mean over the group. Reducing what has accumulated, and not what one backward added, makes every schedule right without
bookkeeping: the mean of (an earlier mean + this rank's new gradient) is (the earlier mean + the mean of the new ones).
So accumulation with and without ``no_sync``, several forwards before several backwards, retained graphs and
reentrant checkpointing (which ends inner passes too) need no special case. The price is that nothing overlaps with the backward
computation; shard large modules instead.

A parameter that no rank has used keeps its gradient as it is; one that some ranks have used counts as zero elsewhere.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_ref.annotations import is_replicated, registry_of, unit_of, walk
from fsdp_ref.api.contract import check_one_module, contract
from fsdp_ref.comm.collectives import broadcast_tensors, collectives_for, cut_into_buckets
from fsdp_ref.comm.division import DivideFactors, divide
from fsdp_ref.comm.groups import default_group
from fsdp_ref.comm.tensor_parallel import is_dtensor
from fsdp_ref.compat import graph_task_id, queue_backward_callback
from fsdp_ref.errors import ConfigError, FsdpRuntimeError, FsdpTypeError, FsdpValueError, UnsupportedError, listing
from fsdp_ref.handle.accumulated import dense
from fsdp_ref.naming import join_fqn
from fsdp_ref.storage.precision import tensors_in
from fsdp_ref.storage.views import alias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch.distributed.device_mesh import DeviceMesh

_WITHOUT_EFFECT: Final = frozenset(
    {"find_unused_parameters", "gradient_as_bucket_view", "static_graph", "check_reduction", "dim"}
)
"""Options of DistributedDataParallel that choose between ways of computing the same gradients; one way serves here."""

_REFUSED: Final = frozenset({"mixed_precision", "delay_all_reduce_named_params", "param_to_hook_all_reduce"})


class ReplicateState:
    """State that ``replicate`` leaves on a module.

    Attributes:
        replica: The running replica, with ``no_sync()``, ``param_names`` and ``device_ids``; None while arguments are
            being checked.
    """

    def __init__(self) -> None:
        self.replica: Replica | None = None


@contract(state_cls=ReplicateState)
def replicate(
    module: nn.Module,
    ignored_modules: Iterable[nn.Module] | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    device_mesh: DeviceMesh | None = None,
    device_id: int | torch.device | None = None,
    bucket_cap_mb: float | None = None,
    broadcast_buffers: bool = True,
    init_sync: bool = True,
    **ddp_kwargs: Any,
) -> nn.Module:
    """Replicate ``module`` over the ranks of a group; returns the same module.

    Args:
        module: the module; its parameters and buffers stay where they are.
        ignored_modules: submodules to leave alone, with everything below them.
        process_group: ranks of the replicas; default: the default group.
        device_mesh: a 1-D mesh in place of ``process_group``.
        device_id: the device of this replica.
        bucket_cap_mb: size of one reduction, in MiB (default 25).
        broadcast_buffers: broadcast rank 0's buffers before each synchronizing forward.
        init_sync: broadcast rank 0's parameters and buffers before the first forward.
        **ddp_kwargs: further options of DistributedDataParallel; options that do not change gradients are accepted, others
            are refused.

    Raises:
        FsdpRuntimeError: ``module`` is a unit of ``fully_shard``, or ``device_id`` has a wrong type.
        AlreadyAppliedError: ``replicate`` was applied to it before.
        FsdpTypeError, UnsupportedError: ``module`` is not one module; unknown or refused options.
        FsdpValueError: ``module`` has no own parameter.

    Collectives:
        None here; broadcasts at the first forward and one or more all-reduces per synchronizing backward, on the group,
        joined by all its ranks.
    """
    check_one_module("replicate", module)
    if unit_of(module) is not None or "fully_shard" in (registry_of(module) or {}):
        raise FsdpRuntimeError(
            f"Cannot apply `replicate()` on a Module already managed by `fully_shard`: expected a plain module, got "
            f"{type(module).__name__}. Apply one of the two."
        )
    if device_id is not None and not isinstance(device_id, (int, torch.device)):
        raise FsdpRuntimeError(
            f"Expected device_id to be int or torch.device, but got {type(device_id).__name__}. Pass for example 'cpu' "
            "as torch.device('cpu')."
        )
    _check_options(ddp_kwargs)
    if process_group is not None and device_mesh is not None:
        raise ConfigError("replicate: expected one of process_group and device_mesh, got both. Pass one.")
    group = device_mesh.get_group() if device_mesh is not None else process_group or default_group()
    skip = {child for ignored in ignored_modules or () for child in ignored.modules()}
    spread = [name for name, param in module.named_parameters() if is_dtensor(param)]
    if spread:
        raise UnsupportedError(
            f"replicate: expected plain parameters, got DTensors: {listing(spread)}. Use fully_shard with NO_SHARD."
        )
    replica = Replica(
        module,
        group,
        skip,
        bucket_bytes=int((25 if bucket_cap_mb is None else bucket_cap_mb) * 2**20),
        broadcast_buffers=broadcast_buffers,
        init_sync=init_sync,
    )
    on_cpu = device_id is None or (isinstance(device_id, torch.device) and device_id.type == "cpu")
    replica.device_ids = None if on_cpu or device_id is None else (device_id,)
    replicate.state(module).replica = replica
    module.register_forward_pre_hook(replica.pre_forward)
    module.register_forward_hook(replica.post_forward)
    return module


def _check_options(given: dict[str, Any]) -> None:
    refused = sorted(name for name in given if name in _REFUSED and given[name] is not None)
    if refused:
        raise UnsupportedError(
            f"replicate: expected replication in the parameters' own dtype, got {listing(refused)}. Drop it."
        )
    unknown = sorted(set(given) - _WITHOUT_EFFECT - _REFUSED)
    if unknown:
        raise FsdpTypeError(
            f"replicate: expected options of DistributedDataParallel ({listing(sorted(_WITHOUT_EFFECT))} and those "
            f"named), got {listing(unknown)}. Check the spelling."
        )


class Replica:
    """One replicated module: what belongs to it is read at its first forward, when nested units are known.

    Args:
        module: the replicated module.
        group: ranks that hold a replica each.
        skip: modules that are left alone.
        bucket_bytes: gradients are reduced in flat pieces of about this size.
        broadcast_buffers: rank 0's buffers are broadcast before each synchronizing forward in training.
        init_sync: rank 0's parameters and buffers are broadcast before the first forward.

    Attributes:
        device_ids: devices as DistributedDataParallel counts them: None on the CPU.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        skip: set[nn.Module],
        *,
        bucket_bytes: int,
        broadcast_buffers: bool,
        init_sync: bool,
    ) -> None:
        self.module = module
        self.group = group
        self.device_ids: tuple[torch.device | int, ...] | None = None
        self._skip = skip
        self._bucket_bytes = bucket_bytes
        self._broadcast_buffers = broadcast_buffers
        self._init_sync = init_sync
        self._factors = DivideFactors.for_world(group.size())
        self._sync = True
        self._ran = False
        self._modules: list[nn.Module] = []
        self._looked: list[tuple[int, ...]] | None = None
        self._hooked: set[nn.Parameter] = set()
        self._awaiting: set[nn.Parameter] = set()
        self._queued_in = -1

    @property
    def param_names(self) -> list[str]:
        """Names of the replicated parameters, without ignored ones and those of nested units."""
        return list(self._members[0])

    @cached_property
    def _members(self) -> tuple[dict[str, nn.Parameter], dict[str, Tensor]]:
        """The parameters and buffers that belong to the replica, by name; fixed when first asked for."""
        return self._find_members()

    def _find_members(self) -> tuple[dict[str, nn.Parameter], dict[str, Tensor]]:
        """Return everything that must be kept equal: everything below the module except ignored modules and nested units."""
        params: dict[nn.Parameter, str] = {}
        buffers: dict[Tensor, str] = {}

        def left_alone(module: nn.Module) -> bool:
            nested = module is not self.module and (unit_of(module) is not None or is_replicated(module))
            return nested or module in self._skip

        visited = list(walk(self.module, left_alone))
        # Also where it hangs outside of the unit once more: its parameters are shards, which differ between ranks.
        apart = {below for _, module in visited if left_alone(module) for below in module.modules()}
        for path, module in visited:
            if module in apart:
                continue
            for name, param in module.named_parameters(recurse=False):
                params.setdefault(param, join_fqn(path, name))
            for name, buffer in module.named_buffers(recurse=False):
                buffers.setdefault(buffer, join_fqn(path, name))
        if not params and not buffers:
            raise FsdpValueError(
                f"replicate: expected a module with its own parameters, got {type(self.module).__name__} without any "
                "that is not ignored or sharded. Drop the call."
            )
        return {name: param for param, name in params.items()}, {name: buffer for buffer, name in buffers.items()}

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
            FsdpRuntimeError: There are trainable parameters that did not exist when the replica recorded its parameters; all are
                named.

        Collectives: broadcasts on the group at the first forward, and of buffers whenever gradients are recorded;
        all ranks must run the same forwards.
        """
        del module, args
        if torch.is_grad_enabled():
            self._refuse_changes()
        first, self._ran = not self._ran, True
        if first and self._init_sync:
            self._broadcast([*self._members[0].values(), *self._members[1].values()])
        elif self._broadcast_buffers and self._sync and torch.is_grad_enabled():
            self._broadcast(self._members[1].values())
        for param in self._members[0].values():
            # Thawed parameters are noticed here: a hook cannot be put on a frozen one.
            if param.requires_grad and param not in self._hooked:
                self._hooked.add(param)
                param.register_post_accumulate_grad_hook(self._hook())

    def _refuse_changes(self) -> None:
        """Check that what is trained belongs to the replica; while nothing is replaced that is one comparison."""
        if self._looked is not None and self._looked == _looks(self._modules):
            return
        known = set(self._members[0].values())
        late = {name: param for name, param in self._find_members()[0].items() if param not in known}
        trained = [name for name, param in late.items() if param.requires_grad]
        if trained:
            raise FsdpRuntimeError(
                f"forward of the replicated {type(self.module).__name__}: expected the parameters of its first "
                f"forward, got trainable parameters added later: {listing(trained)}. Replace or add "
                "modules and parameters before the first forward (gradients of later ones are not averaged), "
                "load values into the parameters that are there, or freeze them."
            )
        self._modules = list(self.module.modules())
        # What is frozen now may be trained later.
        self._looked = None if late else _looks(self._modules)

    def post_forward(self, module: nn.Module, args: object, output: object) -> None:
        """Watch the output, so that a rank whose backward reaches no parameter still joins the reduction."""
        del module, args
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._hook())

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
        # By flags and not by gradients: ranks that used other parameters reduce the same ones.
        self._awaiting.update(param for param in self._members[0].values() if param.requires_grad)
        if self._sync and self.group.size() > 1:
            # Those that were frozen since a local backward, too: their gradients await reduction.
            params = [param for param in self._members[0].values() if param in self._awaiting]
            self._awaiting.clear()
            for bucket in cut_into_buckets(params, self._bucket_bytes):
                self._reduce(bucket)

    @torch.no_grad()
    def _reduce(self, bucket: list[nn.Parameter]) -> None:
        """Average one bucket: all gradients in one flat tensor, followed by one flag per parameter that has one."""
        present = [param.grad is not None for param in bucket]
        pieces = [torch.zeros_like(param) if param.grad is None else dense(param.grad) for param in bucket]
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
            if param.grad is not None and param.grad.layout is torch.strided:
                param.grad.copy_(mean)
            elif used:
                # Of a sparse gradient, too: other ranks have other rows.
                param.grad = mean.clone()

    def _broadcast(self, tensors: Iterable[Tensor]) -> None:
        # What an earlier forward saved for backward may be such a buffer: its version must not change.
        filled = [alias(tensor) for tensor in tensors if tensor.numel()]
        broadcast_tensors(filled, self.group, type(self.module).__name__)


def _looks(modules: Iterable[nn.Module]) -> list[tuple[int, ...]]:
    """Return which children and parameters modules have; the replica holds both, so that no id is reused."""
    return [(*map(id, module._modules.values()), *map(id, module._parameters.values())) for module in modules]
