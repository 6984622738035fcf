"""Clipping the gradients of a whole sharded tree to a total norm.

Collects what every unit's users see as gradients (they may have edited them) and sorts it into parts: gradients that a process
group holds in disjoint shards, and gradients that every rank holds whole and that count once. The sum over a group is kept in
float64, so that every rank sends the same kind of number whatever dtypes it happens to hold, and half-precision squares cannot
overflow.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_ref.annotations import is_replicated, outermost_units
from fsdp_ref.comm.collectives import collectives_for, cut_into_buckets
from fsdp_ref.comm.tensor_parallel import is_dtensor
from fsdp_ref.errors import FsdpRuntimeError, FsdpValueError, RootError, UnsupportedError, listing
from fsdp_ref.handle.accumulated import dense
from fsdp_ref.runtime.root import lazy_init, refuse_busy
from fsdp_ref.storage.memory import upload
from fsdp_ref.storage.views import is_flattened

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fsdp_ref.handle.flat_handle import FlatHandle
    from fsdp_ref.runtime.root import Root
    from fsdp_ref.runtime.unit import Unit
    from fsdp_ref.storage.extension import ParameterExtension

_BUCKET_BYTES: Final = 32 * 2**20


@torch.no_grad()
def clip_grad_norm_(module: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale all gradients at or below ``module`` so that their joint norm over all ranks is at most ``max_norm``.

    Shards count once over their shard group. What several ranks have whole counts once: with NO_SHARD, in the replicas of hybrid
    sharding, and plain parameters on a tensor-parallel axis. Padding does not count. The gradients of ignored parameters are
    not averaged, so they may differ by rank: what counts is their mean, which one process would compute, and each rank scales
    its own by the common factor.

    Args:
        module: A module with one outermost unit.
        max_norm: The bound.
        norm_type: The p of the norm, inf included.

    Returns:
        The norm before clipping, a scalar that is the same on every rank; on the CPU when parameters are offloaded.

    Raises:
        FsdpValueError: There is no unit, or several outermost ones, whose gradients no one norm covers; or a negative or NaN
            ``norm_type``.
        RootError: The unit belongs to a larger tree.
        TrainingStateError: Forward, backward or a summon is under way.
        FsdpRuntimeError: Gradients wait unreduced from ``no_sync``.
        UnsupportedError: Tensor-parallel parameters that are trained and ignored.

    Collectives:
        One all-reduce per shard group, in the order of units; every rank joins, with or without gradients. With tensor
        parallelism two for each, and one over its axis. Before them, where ignored parameters are trained, one of their
        size over each group of the root unit.
    """
    unit, *others = outermost_units(module, "clip_grad_norm_")
    if others:
        raise FsdpValueError(
            "clip_grad_norm_: expected one outermost unit, got "
            f"{listing(type(each.module).__name__ for each in (unit, *others))}. Make the module around them a unit."
        )
    p = check_norm_type(norm_type)
    root = lazy_init(unit)
    _check(unit, root)
    parts = _parts(root)
    own = _unmanaged(root, replicated=False)
    axis = root.tensor_group
    means = GradientPart(tuple(_means(own, unit)), counted=axis is None or axis.rank() == 0)
    norm = total_norm([*parts, means], p, unit.config.device, axis, _usual_dtype(root, own))
    scale_to([grad for part in parts for grad in part.grads], norm, float(max_norm))
    scale_to([param.grad for param in own if param.grad is not None], norm, float(max_norm))
    home = torch.device("cpu") if unit.config.cpu_offload.offload_params else unit.config.device
    return norm.rounded().to(home)


def _check(unit: Unit, root: Root) -> None:
    if not unit.is_root:
        raise RootError(
            "`clip_grad_norm_()` should only be called on the root FSDP instance: expected the outermost unit, got "
            f"{unit!r}. Call it on the module that you run."
        )
    refuse_busy(root.units, "clip_grad_norm_", "Call it between backward and the optimizer's step.")
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
    """Return the dtype of all gradients of the tree on all ranks, unless users replaced some; None for several dtypes."""
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


# ---------------------------------------------------------------------- the arithmetic

_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes whose presence ranks exchange, in the order of the flags behind the norm."""


@dataclass(frozen=True, slots=True, eq=False)
class GradientPart:
    """Gradients with one way of counting.

    Attributes:
        grads: this rank's tensors, without padding; none is legal.
        group: ranks that hold disjoint shards of these gradients; None when every rank holds them whole.
        counted: whether this rank's count beyond that group (see ``across`` of :func:`total_norm`).
    """

    grads: tuple[Tensor, ...]
    group: dist.ProcessGroup | None = None
    counted: bool = True


def check_norm_type(norm_type: float) -> float:
    """Return ``norm_type`` as a float.

    Raises:
        FsdpValueError: negative or NaN.
    """
    value = float(norm_type)
    if math.isnan(value) or value < 0:
        raise FsdpValueError(f"clip_grad_norm_: expected norm_type >= 0 or inf, got {norm_type}. Pass 2.0, 1.0 or inf.")
    return value


@dataclass(frozen=True, slots=True, eq=False)
class TotalNorm:
    """A norm in float64 and the dtype that torch's own clipping would return it in."""

    value: Tensor
    dtype: torch.dtype

    def rounded(self) -> Tensor:
        """Return the norm in its dtype, or in float32 where half precision cannot hold it.

        The factor is computed from the unrounded value: a float16 infinity would turn all gradients into zeros.
        """
        low = self.value.to(self.dtype)
        if self.dtype is not torch.float16:
            return low  # of the same range as float32: nothing to look at, which the host would wait for
        return low if low.isfinite() or not self.value.isfinite() else self.value.to(torch.float32)


def total_norm(
    parts: Sequence[GradientPart],
    norm_type: float,
    device: torch.device,
    across: dist.ProcessGroup | None = None,
    usual: torch.dtype | None = None,
) -> TotalNorm:
    """Return the norm of all gradients together, the same on every rank of each group.

    Args:
        parts: in the same order on all ranks.
        norm_type: the p of the norm; inf for the largest magnitude, 0 for the number of non-zeros.
        device: where collectives run.
        across: ranks that hold other parts of the same parameters, and equal gradients of others (tensor parallelism).
            Of equal ones one rank's are ``counted``: all get the same number, whatever their last bits are.
        usual: the dtype that all gradients of all ranks have unless users replaced some. A rank whose own have it
            does not ask further: reading what others have would make the host wait for its device.

    Returns:
        The norm as a 0-dim tensor, with the dtype that the gradients of all ranks promote to; float32, after a warning,
        when no rank has any gradient.

    Collectives:
        One all-reduce per part with a group; every rank of the group joins it, with or without gradients. One ``across``.
    """
    p = check_norm_type(norm_type)
    op = "max" if math.isinf(p) else "sum"
    sums = torch.zeros(2 + len(_DTYPES), dtype=torch.float64, device=device)
    for part in parts:
        mine = _local_sums(part.grads, p, device)
        if part.group is not None:
            collectives_for(part.group, device).all_reduce(mine, part.group, "clip_grad_norm_", op=op).wait()
        if part.counted:
            sums = torch.maximum(sums, mine) if math.isinf(p) else sums + mine
    if across is not None:
        collectives_for(across, device).all_reduce(sums, across, "clip_grad_norm_", op=op).wait()
    total = sums[0] if math.isinf(p) or p == 0 else sums[0].pow(1.0 / p)
    total = total.masked_fill(sums[1] > 0, math.nan)  # a backend's maximum of NaN and a number may be either
    if usual is not None and {grad.dtype for part in parts for grad in part.grads} == {usual}:
        return TotalNorm(total, usual)
    dtypes = [dtype for dtype, count in zip(_DTYPES, sums[2:].tolist(), strict=True) if count]
    if not dtypes:
        warnings.warn(
            "clip_grad_norm_ was called on all ranks with no gradients -- returning the total norm in the default "
            "dtype torch.float32",
            UserWarning,
            stacklevel=4,
        )
        return TotalNorm(sums[0], torch.float32)
    return TotalNorm(total, reduce(torch.promote_types, dtypes))


def _local_sums(grads: Sequence[Tensor], p: float, device: torch.device) -> Tensor:
    """Return (sum of powers or maximum, whether that is NaN, one flag per dtype present) of this rank's gradients, in float64."""
    norms = [
        # float16 and bfloat16 square in float32; float64 keeps its own precision.
        torch.linalg.vector_norm(grad.detach(), p, dtype=torch.promote_types(grad.dtype, torch.float32))
        for grad in grads
        if grad.numel()
    ]
    powers = [norm.to(device=device, dtype=torch.float64) for norm in norms]
    if not powers:
        joined = torch.zeros((), dtype=torch.float64, device=device)
    elif math.isinf(p):
        joined = torch.stack(powers).amax()
    else:
        joined = torch.stack(powers).pow(p or 1.0).sum()
    present = {grad.dtype for grad in grads}
    flags = upload([float(dtype in present) for dtype in _DTYPES], torch.float64, device)
    return torch.cat([joined.reshape(1), joined.isnan().reshape(1), flags])


def scale_to(grads: Sequence[Tensor], norm: TotalNorm, max_norm: float) -> None:
    """Multiply ``grads`` in place by ``max_norm / (norm + 1e-6)``, at most 1.

    The multiplication is made even where the factor is 1, so that no rank has to read the norm back from its device;
    only gradients that are on the host need it there.
    """
    factor = torch.clamp(float(max_norm) / (norm.value + 1e-6), max=1.0)
    factors: dict[tuple[torch.device, torch.dtype], Tensor] = {}
    for grad in grads:
        kind = grad.device, torch.promote_types(grad.dtype, torch.float32)
        if kind not in factors:
            factors[kind] = factor.to(*kind)
        grad.detach().mul_(factors[kind])
