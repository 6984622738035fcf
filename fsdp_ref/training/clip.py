"""How are the gradients of a whole sharded tree clipped to a total norm?

Collects what every unit's users see as gradients (they may have edited them), sorts it by how ranks hold it, and
leaves the arithmetic to ``norms``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_ref.errors import FsdpRuntimeError, RootError, TrainingStateError, listing
from fsdp_ref.runtime.root import lazy_init
from fsdp_ref.states import TrainingState
from fsdp_ref.training.norms import GradientPart, check_norm_type, scale_to, total_norm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fsdp_ref.handle.flat_handle import FlatHandle
    from fsdp_ref.runtime.root import Root
    from fsdp_ref.runtime.unit import Unit


@torch.no_grad()
def clip_grad_norm_(unit: Unit, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale all gradients below a root unit so that their joint norm is at most ``max_norm``.

    Shards count once over their shard group, replicated gradients (NO_SHARD, the replicas of hybrid sharding) once,
    gradients of parameters that no unit manages once on each rank; padding does not count.

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

    Collectives:
        One all-reduce per shard group, in the order of units; every rank joins, with or without gradients.
    """
    p = check_norm_type(norm_type)
    root = lazy_init(unit)
    _check(unit, root)
    parts = _parts(root)
    norm = total_norm(parts, p, unit.config.device)
    scale_to([grad for part in parts for grad in part.grads], norm, max_norm)
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
    waiting = [each.name or "the root" for each in root.units if each.handle is not None and _unreduced(each.handle)]
    if waiting:
        raise FsdpRuntimeError(
            "clip_grad_norm_: expected gradients that are reduced over ranks, got local ones from no_sync() in "
            f"{listing(waiting)}. Run the last backward of an accumulation outside no_sync()."
        )


def _unreduced(handle: FlatHandle) -> bool:
    handle.grads.absorb()
    return handle.grads.local_F is not None


def _parts(root: Root) -> list[GradientPart]:
    """Sort all gradients: one part per shard group in the order of units, then what every rank holds whole."""
    sharded: dict[dist.ProcessGroup, list[Tensor]] = {}
    whole: list[Tensor] = []
    managed: set[Tensor] = set()
    for unit in root.units:
        handle = unit.handle
        if handle is None:
            continue
        managed.update(handle.originals.params)
        managed.add(handle.flat_param)
        grads = list(_grads(handle))
        if handle.sharded:
            sharded.setdefault(handle.groups.shard, []).extend(grads)
        else:
            whole.extend(grads)
    whole.extend(
        param.grad for param in root.unit.holder.parameters() if param.grad is not None and param not in managed
    )
    parts = [GradientPart(tuple(grads), group) for group, grads in sharded.items()]
    return [*parts, GradientPart(tuple(whole))]


def _grads(handle: FlatHandle) -> Iterator[Tensor]:
    """Yield this rank's gradients of one flat parameter, without gaps and padding."""
    if handle.originals.use_orig_params:
        yield from (param.grad for param in handle.originals.params if param.grad is not None)
    elif handle.flat_param.grad is not None:
        yield from handle.originals.pieces_of(handle.flat_param.grad)
