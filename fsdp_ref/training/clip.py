"""Clipping the gradients of a whole sharded tree to a total norm.

Collects what every unit's users see as gradients (they may have edited them), sorts it by how ranks hold it, and
leaves the arithmetic to ``norms``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_ref.annotations import is_replicated
from fsdp_ref.comm.buckets import cut_into_buckets
from fsdp_ref.comm.collectives import collectives_for
from fsdp_ref.comm.tensor_parallel import is_dtensor
from fsdp_ref.errors import FsdpRuntimeError, RootError, TrainingStateError, UnsupportedError, listing
from fsdp_ref.handle.accumulated import dense
from fsdp_ref.runtime.root import lazy_init
from fsdp_ref.states import TrainingState
from fsdp_ref.storage.views import is_flattened
from fsdp_ref.training.norms import GradientPart, check_norm_type, scale_to, total_norm

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fsdp_ref.handle.flat_handle import FlatHandle
    from fsdp_ref.runtime.root import Root
    from fsdp_ref.runtime.unit import Unit
    from fsdp_ref.storage.extension import ParameterExtension

_BUCKET_BYTES: Final = 32 * 2**20


@torch.no_grad()
def clip_grad_norm_(unit: Unit, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale all gradients below a root unit so that their joint norm is at most ``max_norm``.

    Shards count once over their shard group. What several ranks have whole counts once: with NO_SHARD, in the replicas of hybrid
    sharding, and plain parameters on a tensor-parallel axis. Padding does not count. Nobody averages the gradients of ignored
    parameters, so they may differ by rank: what counts is their mean, which one process would compute, and each rank scales
    its own by the common factor.

    Args:
        unit: a root unit.
        max_norm: the bound.
        norm_type: the p of the norm, inf included.

    Returns:
        The norm before clipping, the same on every rank; on the CPU when parameters are offloaded.

    Raises:
        RootError: ``unit`` is nested.
        TrainingStateError: forward, backward or a summon is under way.
        FsdpRuntimeError: gradients wait unreduced from ``no_sync``.
        FsdpValueError: a negative or NaN ``norm_type``.
        UnsupportedError: tensor-parallel parameters that are trained and ignored.

    Collectives:
        One all-reduce per shard group, in the order of units; every rank joins, with or without gradients. With tensor
        parallelism two for each, and one over its axis. Before them, where ignored parameters are trained, one of their
        size over each group of the root unit.
    """
    p = check_norm_type(norm_type)
    root = lazy_init(unit)
    _check(unit, root)
    parts = _parts(root)
    own = _unmanaged(root, replicated=False)
    axis = root.tensor_group
    means = GradientPart(tuple(_means(own, unit)), counted=axis is None or axis.rank() == 0)
    norm = total_norm([*parts, means], p, unit.config.device, axis, _usual_dtype(root, own))
    scale_to([grad for part in parts for grad in part.grads], norm, max_norm)
    scale_to([param.grad for param in own if param.grad is not None], norm, max_norm)
    home = torch.device("cpu") if unit.config.cpu_offload.offload_params else unit.config.device
    return norm.rounded().to(home)


def _check(unit: Unit, root: Root) -> None:
    if not unit.is_root:
        raise RootError(
            "`clip_grad_norm_()` should only be called on the root FSDP instance: expected the outermost unit, got "
            f"{unit!r}. Call it on the module that you run."
        )
    busy = [repr(each) for each in root.units if each.training_state is not TrainingState.IDLE]
    if busy:
        raise TrainingStateError(
            f"clip_grad_norm_: expected to be in states [{TrainingState.IDLE}], got busy units {listing(busy)}. "
            "Call it between backward and the optimizer's step."
        )
    for each in root.units:
        each.handle.grads.absorb()
    waiting = [u.name or "the root" for u in root.units if u.handle.grads.local_F is not None]
    if waiting:
        raise FsdpRuntimeError(
            "clip_grad_norm_: expected gradients that are reduced over ranks, got local ones from no_sync() in "
            f"{listing(waiting)}. Run the last backward of an accumulation outside no_sync()."
        )


def _parts(root: Root) -> list[GradientPart]:
    """Sort all gradients: by shard group in the order of units, then what every rank holds whole.

    On a tensor-parallel axis each of these is two: gradients of which this rank has a part of its own, and those that
    all ranks of the axis have, which the first of them counts.
    """
    axis = root.tensor_group
    equal_counts = axis is None or axis.rank() == 0
    found: dict[tuple[dist.ProcessGroup | None, bool], list[Tensor]] = {}
    for unit in root.units:
        handle = unit.handle
        if handle.empty:
            continue
        group = handle.groups.shard if handle.sharded else None
        for equal in (False, True) if axis is not None else (True,):
            found.setdefault((group, equal), [])
        for grad, extension in _grads(handle):
            equal = extension is None or extension.group is None or not extension.differs
            found[group, equal].append(grad)
    whole = [param.grad for param in _unmanaged(root, replicated=True) if param.grad is not None]
    found.setdefault((None, True), []).extend(whole)
    parts = sorted(found.items(), key=lambda item: item[0][0] is None)
    return [GradientPart(tuple(grads), group, equal_counts or not equal) for (group, equal), grads in parts]


def _usual_dtype(root: Root, own: Sequence[nn.Parameter]) -> torch.dtype | None:
    """Return the dtype that all gradients of the tree have, on all ranks, unless somebody replaced one; None for several."""
    dtypes = {param.dtype for param in (*own, *_unmanaged(root, replicated=True))}
    dtypes |= {unit.handle.precision.grad for unit in root.units if any(unit.handle.originals.trainable())}
    return dtypes.pop() if len(dtypes) == 1 else None


def _unmanaged(root: Root, *, replicated: bool) -> list[nn.Parameter]:
    """Return the trained parameters of no unit: those that replication keeps equal on all ranks, or the ignored others."""
    module = root.unit.holder
    equal = {param for part in module.modules() if is_replicated(part) for param in part.parameters()}
    own = {name: p for name, p in module.named_parameters() if p.requires_grad and not is_flattened(p)}
    spread = [name for name, param in own.items() if is_dtensor(param)]
    if spread:
        raise UnsupportedError(
            f"clip_grad_norm_: expected parameters of units, or plain ones, got DTensors that no unit has: {listing(spread)}. "
            "Do not ignore them."
        )
    return [param for param in own.values() if (param in equal) is replicated]


def _means(params: Sequence[nn.Parameter], unit: Unit) -> Iterator[Tensor]:
    """Yield the means over ranks of these parameters' gradients, several in one tensor; None counts as zeros."""
    groups = unit.config.groups
    for bucket in cut_into_buckets(params, _BUCKET_BYTES):
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else dense(p.grad)).reshape(-1) for p in bucket])
        for group in (groups.shard, groups.replicate):
            if group is not None and group.size() > 1:
                collectives_for(group, flat.device).all_reduce(flat, group, "clip_grad_norm_").wait()
        yield flat.div_(groups.total_size)


def _grads(handle: FlatHandle) -> Iterator[tuple[Tensor, ParameterExtension | None]]:
    """Yield this rank's gradients of one flat parameter, without gaps and padding, and what is special about each."""
    originals = handle.originals
    if originals.use_orig_params:
        grads = [param.grad for param in originals.params]
        yield from ((grad, each) for grad, each in zip(grads, originals.extensions) if grad is not None)
    elif handle.flat_param.grad is not None:
        yield from zip(originals.pieces_of(handle.flat_param.grad), originals.extensions)
