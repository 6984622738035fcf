"""The norm of gradients that are spread over ranks, and scaling them down to a bound.

Works on parts: gradients that a process group holds in disjoint shards, and gradients that every rank holds whole and
that count once. Padding never reaches this file. The sum over a group is kept in float64, so that every rank sends the
same kind of number whatever dtypes it happens to hold, and half-precision squares cannot overflow.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Final

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_ref.comm.collectives import collectives_for
from fsdp_ref.errors import FsdpValueError
from fsdp_ref.storage.offload import upload

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        usual: the dtype that all gradients of all ranks have unless somebody replaced some. A rank whose own have it
            does not ask further: reading what others have would make the host wait for its device.

    Returns:
        The norm as a 0-dim tensor, with the dtype that the gradients of all ranks promote to; float32, after a warning,
        when no rank has any gradient.

    Collectives:
        One all-reduce per part with a group; every rank of the group joins it, with or without gradients. One ``across``.
    """
    p = check_norm_type(norm_type)
    op = "max" if math.isinf(p) else "sum"
    sums = torch.zeros(1 + len(_DTYPES), dtype=torch.float64, device=device)
    for part in parts:
        mine = _local_sums(part.grads, p, device)
        if part.group is not None:
            collectives_for(part.group, device).all_reduce(mine, part.group, "clip_grad_norm_", op=op).wait()
        if part.counted:
            sums = torch.maximum(sums, mine) if math.isinf(p) else sums + mine
    if across is not None:
        collectives_for(across, device).all_reduce(sums, across, "clip_grad_norm_", op=op).wait()
    total = sums[0] if math.isinf(p) or p == 0 else sums[0].pow(1.0 / p)
    if usual is not None and {grad.dtype for part in parts for grad in part.grads} == {usual}:
        return TotalNorm(total, usual)
    dtypes = [dtype for dtype, count in zip(_DTYPES, sums[1:].tolist(), strict=True) if count]
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
    """Return (sum of powers or maximum, one flag per dtype present) of this rank's gradients, in float64."""
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
    return torch.cat([joined.reshape(1), flags])


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
