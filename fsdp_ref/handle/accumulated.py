"""The values of one flat parameter's gradient: what this rank accumulates, and what ranks have reduced.

Two parts may exist at once: the *reduced* part (this rank's piece of the average over ranks) and the *local* part (this
rank's own full gradient, from backward passes without synchronisation). What users see of them stands in ``gradients``.

An original parameter that no rank used has no gradient, as in one process: an optimizer must not decay it (see ``usage``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fsdp_ref.handle.usage import UsageMarks
from fsdp_ref.layout import FlatLayout, ShardMap
from fsdp_ref.storage.memory import send_gradient_home
from fsdp_ref.storage.precision import Precision
from fsdp_ref.storage.views import flat_views, gap_views

_INTEGER_OF = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


@dataclass(frozen=True, slots=True)
class Uses:
    """Who has a gradient in a reduced sum.

    Attributes:
        by_this_rank: per original.
        unused_by_all: per marked element of the shard, whether no rank has one; on the device, so that the host does not wait.
            None if this rank knows enough.
    """

    by_this_rank: Sequence[bool]
    unused_by_all: Tensor | None = None


class Accumulated:
    """The two parts of one flat parameter's gradient; no process group is needed.

    Args:
        shard_map: Places of originals in the flat parameter and in shards.
        rank: The rank that has the shard.
        precision: The dtypes; set anew where the model is cast.
        device: The device on which gradients are made.
        offloads: The shard, and so the reduced part, lives on the host.

    Attributes:
        reduced_S: reduced part, shard-sized with right padding; None without one.
        used: per original whether the reduced part has a gradient of any rank for it, as far as was read.
        rest_S: the rounding error of a sum whose dtype is narrower than its summands'; valid while the sum is unchanged.
        arriving: the reduced part may still be on its way to the host.
        local_F: local part, full-sized with all padding, in the wider of the dtypes of parameters and of reduction, so
            that many small gradients are not rounded away; None without one.
        local_used: per original whether the local part has a gradient of this rank for it.
    """

    def __init__(
        self, shard_map: ShardMap, rank: int, precision: Precision, device: torch.device, *, offloads: bool
    ) -> None:
        self._shard_map = shard_map
        self._rank = rank
        self.precision = precision
        self._device = device
        self._offloads = offloads
        self._home = torch.device("cpu") if offloads else device
        self.reduced_S: Tensor | None = None
        self.rest_S: Tensor | None = None
        self.arriving = False
        self.local_F: Tensor | None = None
        self.used = self._nobody()
        self.local_used = self._nobody()
        # Read only when users get the gradients: reading waits for the device.
        self._unread: list[Tensor] = []

    def _nobody(self) -> list[bool]:
        return [False] * len(self._shard_map.layout)

    @property
    def both(self) -> bool:
        """Whether both parts exist."""
        return self.local_F is not None and self.reduced_S is not None

    @cached_property
    def marks(self) -> UsageMarks:
        """Where uses are marked; made on first use, for it takes a while."""
        return UsageMarks(self._shard_map, self._rank, self._device)

    # ------------------------------------------------------------------ the local part

    def add_local(self, grads: Sequence[Tensor | None]) -> None:
        """Add this rank's full gradients, one per original, None for unused."""
        self.local_used = [was or grad is not None for was, grad in zip(self.local_used, grads, strict=True)]
        # Not in the dtype of computation: bfloat16 would lose the small gradients of a long accumulation.
        dtype = torch.promote_types(self.precision.original, self.precision.reduce)
        if self.local_F is None:
            self.local_F = torch.empty(self._shard_map.padded_numel, dtype=dtype, device=self._device)
            fill_flat(self.local_F, self._shard_map.layout, grads)
            return
        # Wider if the model was cast in between; never narrower, for it would round what is there.
        self.local_F = self.local_F.to(torch.promote_types(self.local_F.dtype, dtype))
        for view, grad in zip(flat_views(self.local_F, self._shard_map.layout), grads, strict=True):
            if grad is not None:
                view.add_(dense(grad))

    def take_local(self) -> tuple[Tensor | None, list[bool]]:
        """Return the local part and who is in it, and forget both: it is about to be reduced."""
        # Forgotten here and not when the sum arrives: a reduction that fails must not leave it to be reduced twice.
        taken = self.local_F, self.local_used
        self.local_F, self.local_used = None, self._nobody()
        return taken

    def local_digests(self) -> Tensor:
        """Return per original whether its local part is anything but zero, and a sum of its bits, ``(2, originals)``.

        The host does not wait for the device.
        """
        assert self.local_F is not None  # the caller looked
        as_bits = self.local_F.view(_INTEGER_OF[self.local_F.element_size()])
        views, bits = (flat_views(flat, self._shard_map.layout) for flat in (self.local_F, as_bits))
        return torch.stack([torch.stack([view.any().long(), bit.sum()]) for view, bit in zip(views, bits)], dim=1)

    # ------------------------------------------------------------------ the reduced part

    def uses_in(self, sum_S: Tensor, by_this_rank: Sequence[bool], trainable: Sequence[bool]) -> Uses:
        """Return the used parameters of a sum as it arrived: a division may underflow to the mark ([Note: marks of use])."""
        known = all(mine or was or not wanted for mine, was, wanted in zip(by_this_rank, self.used, trainable))
        return Uses(by_this_rank, None if known else self.marks.unused(sum_S, shard=True))

    def add_reduced(self, grad_S: Tensor, uses: Uses) -> None:
        """Add a reduced gradient, shard-sized; this object owns it from now on."""
        self.used = [was or now for was, now in zip(self.used, uses.by_this_rank, strict=True)]
        # On the device, and read at the end of the pass alone: the host would stop for each unit here.
        if uses.unused_by_all is not None:
            self._unread.append(uses.unused_by_all)
        precision = self.precision
        kept = grad_S.dtype if precision.keep_reduced else precision.original
        if self.reduced_S is None:
            # The first one is taken as it is: no copy but that to the host.
            self.reduced_S = send_gradient_home(grad_S, self._home, kept)
            self.arriving = self._offloads
            return
        # Low-precision gradients are added in the widest dtype of all, so that accumulation loses nothing; what the sum
        # cannot hold is added with the next one.
        wide = torch.promote_types(torch.promote_types(self.reduced_S.dtype, grad_S.dtype), precision.original)
        new_S = grad_S.to(self._home, wide)  # first: it waits for a copy to the host that may still write reduced_S
        total = self.reduced_S.to(wide)
        total = (total if self.rest_S is None else total.add_(self.rest_S)).add_(new_S)
        self.reduced_S = total.to(kept)
        self.rest_S = None if kept == wide else total.sub_(self.reduced_S)

    def read_uses(self) -> None:
        """Learn which parameters other ranks used. The host waits for the device where this rank did not know."""
        # In the order of reductions; each was computed on the stream that its sum arrived on, which compute has waited for.
        for unused in self._unread:
            for owner, nobody in zip(self.marks.my_owners, unused.tolist(), strict=True):
                self.used[owner] = self.used[owner] or not nobody
        self._unread.clear()

    def drop_arriving(self, trainable: Sequence[bool]) -> None:
        """Forget a part that may still be in flight: the pass failed, and its result is not awaited."""
        if self._unread:
            self._unread.clear()
            # Who used what is on the device, which may wait for ranks that will not come: zeros are shown rather than nothing.
            self.used = list(trainable)
        # The copy may still write to it, so it is dropped and not cleared.
        if self.arriving:
            self.reduced_S = None
            self.arriving = False

    def replace_reduced(self, values: Tensor, used: list[bool]) -> None:
        """Set the reduced part to ``values`` (without right padding)."""
        self.used, self.rest_S = used, None
        self.make_reduced(values.dtype)[: values.numel()].copy_(values)

    def make_reduced(self, dtype: torch.dtype) -> Tensor:
        """Return the reduced part, made of zeros in ``dtype`` if there was none."""
        if self.reduced_S is None:
            self.reduced_S = torch.zeros(self._shard_map.shard_numel, dtype=dtype, device=self._home)
        return self.reduced_S

    def forget(self) -> None:
        """Drop both parts."""
        self.reduced_S = self.local_F = self.rest_S = None
        self.used, self.local_used = self._nobody(), self._nobody()
        self._unread.clear()

    def become_zeros(self) -> None:
        """Users zeroed the local part: zeros remain, as in one process, and not None."""
        assert self.reduced_S is not None  # the caller looked
        # A new tensor: what users hold of the old one stays as they made it.
        self.local_F, self.reduced_S = None, torch.zeros_like(self.reduced_S)
        self.used = [one or other for one, other in zip(self.used, self.local_used, strict=True)]
        self.local_used = self._nobody()


def dense(grad: Tensor) -> Tensor:
    """Return a strided tensor (embeddings may hand out sparse gradients)."""
    return grad if grad.layout is torch.strided else grad.to_dense()


def fill_flat(flat_F: Tensor, layout: FlatLayout, grads: Sequence[Tensor | None], divisor: float = 1.0) -> None:
    """Write gradients into a flat buffer, divided by ``divisor``; unused parameters and padding become zero.

    Dividing while copying saves a pass over the memory. Only where the dtype stays the same: casting first and
    dividing then is what low-precision reduction is specified to do, and the roundings differ.
    """
    for view, grad in zip(flat_views(flat_F, layout), grads):
        if grad is None:
            view.zero_()
        elif divisor == 1.0:
            view.copy_(dense(grad))
        elif grad.dtype == flat_F.dtype:
            # The divisor is a power of two, so multiplying by its inverse gives the same bits.
            torch.mul(dense(grad), 1.0 / divisor, out=view)
        else:
            view.copy_(dense(grad)).div_(divisor)
    for gap in gap_views(flat_F, layout):
        gap.zero_()
