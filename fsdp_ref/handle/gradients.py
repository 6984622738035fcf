"""What is the gradient of a flat parameter at each moment, and what do users see of it?

Two parts may exist at once: the *reduced* part (this rank's piece of the average over ranks) and the *local* part (this
rank's own full gradient, gathered by backward passes without synchronisation). Users see the local part while there is
one, as DDP users do, and the reduced part otherwise.

Users change gradients between passes: set them to None, zero them, replace them. :meth:`GradientStore.absorb` reads
those changes before the store is used again, so what users see is the truth.

An original parameter that no rank used has no gradient, as in one process: an optimizer must not decay it (see ``usage``).
A flat parameter has one gradient for all of its originals, with zeros for those that nobody used.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fsdp_ref.errors import WritebackError, explain
from fsdp_ref.handle.originals import Originals
from fsdp_ref.handle.usage import UsageMarks
from fsdp_ref.layout import FlatLayout
from fsdp_ref.storage.offload import send_gradient_home
from fsdp_ref.storage.views import flat_views, gap_views, set_grad

if TYPE_CHECKING:
    from fsdp_ref.handle.flat_handle import FlatHandle


class GradientStore:
    """The gradient of one flat parameter.

    Attributes:
        reduced_S: reduced part, shard-sized with right padding; None without one.
        local_F: local part, full-sized with all padding, in the wider of the dtypes of parameters and of reduction, so
            that many small gradients are not rounded away; None without one.
        used: per original whether the reduced part has a gradient of any rank for it.
        local_used: the same for the local part, of this rank alone.
        taken: the same for what this rank sent last to be reduced.
        arriving: the reduced part may still be on its way to the host.
    """

    def __init__(self, handle: FlatHandle, originals: Originals) -> None:
        self._handle = handle
        self._originals = originals
        self._many = originals.use_orig_params
        # The tensors whose ``.grad`` users see.
        self._shown_params: Sequence[Tensor] = originals.params if self._many else [handle.flat_param]
        self.reduced_S: Tensor | None = None
        self.local_F: Tensor | None = None
        self.used = self._nobody()
        self.local_used = self._nobody()
        self.taken = self._nobody()
        self.arriving = False
        # What users were given: the gradient object per tensor, and where its memory was.
        self._given: list[Tensor | None] = []
        self._given_ptrs: list[int] = []
        self._seen_versions: list[int] = []
        # Per original whether its local part was anything but zero; on the device, so that nobody waits for it.
        self._were_used: Tensor | None = None
        # What rounding took from a sum whose dtype is narrower than that of its summands; valid while nobody wrote to it.
        self._lost_S: Tensor | None = None
        # Of the reduction that is added next: whom this rank knows of, and the marks that tell of the others.
        self._noted: tuple[Sequence[bool], Tensor | None] | None = None
        # Read when users are given the gradients and not before: who reads waits for the device.
        self._unread: list[Tensor] = []

    def _nobody(self) -> list[bool]:
        return [False] * len(self._originals.params)

    @cached_property
    def marks(self) -> UsageMarks:
        """Where uses are marked; made on first use."""
        return UsageMarks(self._handle.shard_map, self._handle.shard_rank, self._handle.config.device)

    # ------------------------------------------------------------------ adding

    def add_local(self, grads: Sequence[Tensor | None]) -> None:
        """Add this rank's full gradients (one per original, None for unused) to the local part."""
        self.absorb()
        handle = self._handle
        self.local_used = [was or grad is not None for was, grad in zip(self.local_used, grads)]
        dtype = torch.promote_types(handle.precision.original, handle.precision.reduce)
        if self.local_F is None:
            self.local_F = torch.empty(handle.shard_map.padded_numel, dtype=dtype, device=handle.config.device)
            fill_flat(self.local_F, handle.layout, grads)
            return
        self.local_F = self.local_F.to(torch.promote_types(self.local_F.dtype, dtype))
        for view, grad in zip(flat_views(self.local_F, handle.layout), grads):
            if grad is not None:
                view.add_(dense(grad))
        # Written by us: zeros that a rank without rows adds are not a user's zero_grad.
        self._remember()

    def take_local(self, grads: Sequence[Tensor | None] = ()) -> Tensor | None:
        """Return the local part with ``grads`` added and forget it: it is about to be reduced. None without a local part."""
        self.absorb()
        if self.local_F is not None and grads:
            self.add_local(grads)
        local, self.local_F = self.local_F, None
        return local

    def stamp(self, flat_F: Tensor, grads: Sequence[Tensor | None], *, kept: bool) -> None:
        """Mark in what is about to be reduced who used what: ``grads``, and (``kept``) the local part that was taken."""
        self.taken = [grad is not None for grad in grads]
        if kept:
            self.taken, self.local_used = self.local_used, self._nobody()
        if self._many:
            self.marks.stamp(flat_F, self.taken)

    def note_use(self, used: Sequence[bool], sum_S: Tensor) -> None:
        """Say who used what is added next: this rank what ``used`` says, and other ranks what the sum's marks say."""
        wanted = self._originals.trainable
        known = not self._many or all(used) or all(u or w or not t for u, w, t in zip(used, self.used, wanted()))
        self._noted = used, None if known else self.marks.unused(sum_S, shard=True)

    def add_reduced(self, grad_S: Tensor) -> None:
        """Add a reduced gradient (shard-sized; the store owns it from now on)."""
        self.absorb()
        (used, marks), self._noted = self._noted or (self._originals.trainable(), None), None
        self.used = [was or now for was, now in zip(self.used, used)]
        if marks is not None:
            self._unread.append(marks)
        home, precision = self._handle.shard_S.device, self._handle.precision
        kept = grad_S.dtype if precision.keep_reduced else precision.original
        if self.reduced_S is None:
            self.reduced_S = send_gradient_home(grad_S, home, kept)
            self.arriving = self._handle.config.offload
            return
        # Low-precision gradients are added in the widest dtype of all, so that accumulation loses nothing; what the sum
        # cannot hold is added with the next one.
        wide = torch.promote_types(torch.promote_types(self.reduced_S.dtype, grad_S.dtype), precision.original)
        new_S = grad_S.to(home, wide)  # first: it waits for a copy to the host that may still write reduced_S
        total = self.reduced_S.to(wide)
        total = (total if self._lost_S is None else total.add_(self._lost_S)).add_(new_S)
        self.reduced_S = total.to(kept)
        self._lost_S = None if kept == wide else total.sub_(self.reduced_S)
        self._remember()

    def drop_arriving(self) -> None:
        """Forget a reduced part that may still be on its way: the pass failed, and nobody waits for it."""
        if self._unread:
            self._unread.clear()
            self.used = self._originals.trainable()
        if self.arriving:
            self.reduced_S = None
            self.arriving = False

    def spoil(self, problem: Tensor) -> None:
        """Make the reduced part NaN where ``problem``, one boolean on its device, says so; the host does not read it."""
        if self.reduced_S is not None and problem.device == self.reduced_S.device:
            self.reduced_S.masked_fill_(problem, float("nan"))
            self._remember()

    def replace_reduced(self, values: Tensor, used: list[bool]) -> None:
        """Set the reduced part to ``values`` (without right padding); the caller publishes it."""
        self.used, self._lost_S = used, None
        if self.reduced_S is None:
            numel = self._handle.shard_map.shard_numel
            self.reduced_S = torch.zeros(numel, dtype=values.dtype, device=self._handle.shard_S.device)
        self.reduced_S[: values.numel()].copy_(values)

    # ------------------------------------------------------------------ what users see

    def publish(self) -> None:
        """Give users the gradients: the local part while there is one, else the reduced part, else nothing."""
        handle = self._handle
        self.arriving = False
        if not self._many:
            local_F = self.local_F
            shown = self.reduced_S if local_F is None else local_F[: handle.layout.numel]
            self._give([handle.flat_param], [shown])
            return
        for marks in self._unread:
            for owner, unused in zip(self.marks.my_owners, marks.tolist()):
                self.used[owner] = self.used[owner] or not unused
        self._unread.clear()
        params, values = self._originals.params, list[Tensor | None]()
        if self.local_F is not None:
            # One that only the reduced part has shows zeros of its own shape until the two are one.
            for view, used, local in zip(flat_views(self.local_F, handle.layout), self.used, self.local_used):
                values.append(view if used or local else None)
        elif self.reduced_S is not None:
            for index, piece in enumerate(self._originals.pieces_of(self.reduced_S)):
                values.append(piece if self.used[index] and self._originals.present(index) else None)
        self._give(params, values or [None] * len(params))

    def _give(self, params: Sequence[Tensor], values: Sequence[Tensor | None]) -> None:
        for param, value in zip(params, values):
            set_grad(param, value)
        self._take_as_given(params)

    def absorb(self) -> None:
        """Read what users did to the gradients since they were published.

        Raises:
            WritebackError: a gradient was replaced by one of another shape.
        """
        changed = []
        params = self._shown_params
        given, pointers = self._given or [None] * len(params), self._given_ptrs
        for index, param in enumerate(params):
            grad = param.grad
            if grad is not given[index] or (grad is not None and grad.data_ptr() != pointers[index]):
                changed.append(index)
        both = self.local_F is not None and self.reduced_S is not None
        written = (both or self._lost_S is not None) and self._versions() != self._seen_versions
        were_used = self._were_used  # before replaced gradients are taken in, which notes what is there then
        if not (changed or written):
            return
        # A forward under inference_mode() may be the first to look; what is made here later backwards add to.
        with torch.inference_mode(False), torch.no_grad():
            if changed:
                self._absorb(params, changed)
            if written:
                self._lost_S = None
            if self.local_F is not None and self.reduced_S is not None:
                self._forget_zeroed(were_used)

    def _versions(self) -> list[int]:
        """Count the writes to what users see: by its own counter, and by those of gradients that have one of their own.

        Where torch refuses a full gradient for a sharded parameter, what users hold shares the memory and nothing else.
        """
        seen = self.reduced_S if self.local_F is None else self.local_F
        return [t._version for t in (seen, *self._given) if t is not None and not t.is_inference()]

    def _remember(self) -> None:
        """Remember the gradients as they are now: later differences are the user's."""
        both = self.local_F is not None and self.reduced_S is not None
        if both or self._lost_S is not None:
            self._seen_versions = self._versions()
        self._were_used = self._nonzero() if both else None

    def _nonzero(self) -> Tensor:
        """Return per original whether its local part is anything but zero, without waiting for the device."""
        assert self.local_F is not None  # the caller looked
        return torch.stack([view.any() for view in flat_views(self.local_F, self._handle.layout)])

    def _forget_zeroed(self, were_used: Tensor | None) -> None:
        """Users saw the local part only. What they made zero means "forget this gradient", the reduced part with it.

        Of several originals one that was zero before is left alone: whether it was zeroed or not used cannot be known.
        """
        assert self.reduced_S is not None  # the caller looked
        now = self._nonzero()
        before = now if were_used is None else were_used
        are_used, before_used = torch.stack([now, before]).tolist()  # the one place where the host waits
        if not any(are_used):
            # Zeros from here on, as in one process: not None.
            self.local_F, self.reduced_S = None, torch.zeros_like(self.reduced_S)
            self.used = [one or other for one, other in zip(self.used, self.local_used)]
            self.local_used = self._nobody()
            # At once: a backward that does not reach this unit shows nothing anew, and users have full-sized zeros.
            self.publish()
            return
        if self._many:
            for piece, is_used, was_used in zip(self._originals.pieces_of(self.reduced_S), are_used, before_used):
                if was_used and not is_used:
                    piece.zero_()
        self._remember()

    def _absorb(self, params: Sequence[Tensor], changed: list[int]) -> None:
        if all(param.grad is None for param in params):
            self.forget()
            return
        self._lost_S = None
        target = self._target(params, changed)
        pieces = self._originals.pieces_of(self.reduced_S) if self._many and self.reduced_S is not None else []
        for index in changed:
            grad, view = params[index].grad, target[index]
            if grad is None:
                view.zero_()
                self.used[index] = self.local_used[index] = False
                if pieces:
                    pieces[index].zero_()  # what users saw was the local part; they drop all of it
            elif grad.numel() or view.numel():
                self._check(index, grad, view)
                view.copy_(grad)
                (self.used if self.local_F is None else self.local_used)[index] = True
        self._take_as_given(params)

    def _take_as_given(self, params: Sequence[Tensor]) -> None:
        self._given = [param.grad for param in params]
        self._given_ptrs = [0 if grad is None else grad.data_ptr() for grad in self._given]
        self._remember()

    def _target(self, params: Sequence[Tensor], changed: list[int]) -> list[Tensor]:
        """Return where replaced gradients are copied to, making a reduced part when there was no gradient."""
        handle = self._handle
        if self.local_F is not None:
            flat = self.local_F
            return flat_views(flat, handle.layout) if self._many else [flat[: handle.layout.numel]]
        if self.reduced_S is None:
            dtypes = {grad.dtype for grad in (params[index].grad for index in changed) if grad is not None}
            dtype = dtypes.pop() if len(dtypes) == 1 else handle.precision.original
            self.reduced_S = torch.zeros(handle.shard_map.shard_numel, dtype=dtype, device=handle.shard_S.device)
        return self._originals.pieces_of(self.reduced_S) if self._many else [self.reduced_S]

    def _check(self, index: int, grad: Tensor, view: Tensor) -> None:
        if grad.shape == view.shape:
            return
        handle = self._handle
        fqn = handle.fqns[index] if self._many else "the flat parameter"
        raise WritebackError(
            explain(
                f"gradient of {fqn} in {handle.name!r}",
                expected=f"shape {tuple(view.shape)}",
                got=f"{tuple(grad.shape)}",
                remedy="Cannot writeback when the gradient shape changes; assign one of the parameter's present shape",
            )
        )

    def release(self) -> None:
        """Free the memory of gradients that users dropped (``zero_grad(set_to_none=True)``), before forward needs memory."""
        if self.reduced_S is None and self.local_F is None:
            return
        if self._given and all(param.grad is None for param in self._shown_params):
            self.absorb()

    def forget(self) -> None:
        """Drop both parts and what users were given."""
        self.reduced_S = self.local_F = self._lost_S = None
        self.used = self._nobody()
        self.local_used = self.used.copy()
        self._unread.clear()
        self._given = []
        self._given_ptrs = []


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
