"""What is the gradient of a flat parameter at each moment, and what do users see of it?

Two parts may exist at once: the *reduced* part (this rank's piece of the average over ranks) and the *local* part (this
rank's own full gradient, gathered by backward passes without synchronisation). Users see the local part while there is
one, as DDP users do, and the reduced part otherwise.

Users change gradients between passes: set them to None, zero them, replace them. :meth:`GradientStore.absorb` reads
those changes before the store is used again, so what users see is the truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fsdp_ref.errors import WritebackError, explain
from fsdp_ref.handle.originals import Originals
from fsdp_ref.layout import FlatLayout
from fsdp_ref.storage.offload import send_gradient_home
from fsdp_ref.storage.views import flat_views, gap_views, set_grad

if TYPE_CHECKING:
    from fsdp_ref.handle.flat_handle import FlatHandle


class GradientStore:
    """The gradient of one flat parameter.

    Attributes:
        reduced_S: reduced part, shard-sized with right padding; None without one.
        local_F: local part, full-sized with all padding, in the wider of the dtypes of computation and of reduction, so
            that many small gradients are not rounded away; None without one.
        arriving: the reduced part may still be on its way to the host.
    """

    def __init__(self, handle: FlatHandle, originals: Originals) -> None:
        self._handle = handle
        self._originals = originals
        self.reduced_S: Tensor | None = None
        self.local_F: Tensor | None = None
        self.arriving = False
        # What users were given: the gradient object per tensor, and where its memory was.
        self._given: list[Tensor | None] = []
        self._given_ptrs: list[int] = []
        self._seen_versions: list[int] = []
        # Per original whether its local part was anything but zero; on the device, so that nobody waits for it.
        self._were_used: Tensor | None = None

    # ------------------------------------------------------------------ adding

    def add_local(self, grads: Sequence[Tensor | None]) -> None:
        """Add this rank's full gradients (one per original, None for unused) to the local part."""
        self.absorb()
        handle = self._handle
        dtype = torch.promote_types(handle.compute_dtype, handle.precision.reduce)
        if self.local_F is None:
            self.local_F = torch.empty(handle.shard_map.padded_numel, dtype=dtype, device=handle.config.device)
            fill_flat(self.local_F, handle.layout, grads)
            return
        self.local_F = self.local_F.to(torch.promote_types(self.local_F.dtype, dtype))
        for view, grad in zip(flat_views(self.local_F, handle.layout), grads):
            if grad is not None:
                view.add_(dense(grad))
        # Written by us: zeros that a rank without rows adds are not a user's zero_grad.
        self._remember_local()

    def take_local(self, grads: Sequence[Tensor | None] = ()) -> Tensor | None:
        """Return the local part with ``grads`` added and forget it: it is about to be reduced. None without a local part."""
        self.absorb()
        if self.local_F is not None and grads:
            self.add_local(grads)
        local, self.local_F = self.local_F, None
        return local

    def add_reduced(self, grad_S: Tensor) -> None:
        """Add a reduced gradient (shard-sized; the store owns it from now on)."""
        self.absorb()
        home = self._handle.shard_S.device
        if self.reduced_S is None:
            dtype = self._kept_dtype(grad_S)
            self.reduced_S = send_gradient_home(grad_S, home, dtype)
            self.arriving = self._handle.config.offload
        else:
            # Low-precision gradients are added in the wider dtype of the two, so that accumulation loses nothing.
            wide = torch.promote_types(self.reduced_S.dtype, grad_S.dtype)
            new_S = grad_S.to(home, wide)  # first: it waits for a copy to the host that may still write reduced_S
            total = self.reduced_S.to(wide).add_(new_S)
            self.reduced_S = total.to(self._kept_dtype(grad_S))

    def drop_arriving(self) -> None:
        """Forget a reduced part that may still be on its way: the pass failed, and nobody waits for it."""
        if self.arriving:
            self.reduced_S = None
            self.arriving = False

    def replace_reduced(self, values: Tensor) -> None:
        """Set the reduced part to ``values`` (without right padding); the caller publishes it."""
        if self.reduced_S is None:
            numel = self._handle.shard_map.shard_numel
            self.reduced_S = torch.zeros(numel, dtype=values.dtype, device=self._handle.shard_S.device)
        self.reduced_S[: values.numel()].copy_(values)

    def _kept_dtype(self, grad_S: Tensor) -> torch.dtype:
        return grad_S.dtype if self._handle.precision.keep_reduced else self._handle.precision.original

    # ------------------------------------------------------------------ what users see

    def publish(self) -> None:
        """Give users the gradients: the local part while there is one, else the reduced part, else nothing."""
        handle = self._handle
        self.arriving = False
        if not self._originals.use_orig_params:
            local_F = self.local_F
            shown = self.reduced_S if local_F is None else local_F[: handle.layout.numel]
            self._give([handle.flat_param], [shown])
            return
        params = self._originals.params
        if self.local_F is not None:
            values: list[Tensor | None] = [*flat_views(self.local_F, handle.layout)]
        elif self.reduced_S is not None:
            values = [
                piece if self._originals.present(index) else None
                for index, piece in enumerate(self._originals.pieces_of(self.reduced_S))
            ]
        else:
            values = [None] * len(params)
        had = self._given or [None] * len(params)
        for index, param in enumerate(params):
            # A frozen original gets nothing new; what it had before it was frozen stays, as in plain torch.
            if not param.requires_grad and had[index] is None:
                values[index] = None
        self._give(params, values)

    def _give(self, params: Sequence[Tensor], values: Sequence[Tensor | None]) -> None:
        for param, value in zip(params, values):
            set_grad(param, value)
        self._given = [param.grad for param in params]
        self._given_ptrs = [0 if grad is None else grad.data_ptr() for grad in self._given]
        self._remember_local()

    def absorb(self) -> None:
        """Read what users did to the gradients since they were published.

        Raises:
            WritebackError: a gradient was replaced by one of another shape.
        """
        handle = self._handle
        params = self._originals.params if self._originals.use_orig_params else [handle.flat_param]
        given = self._given or [None] * len(params)
        pointers = self._given_ptrs or [0] * len(params)
        changed = [
            index
            for index, param in enumerate(params)
            if param.grad is not given[index] or (param.grad is not None and param.grad.data_ptr() != pointers[index])
        ]
        if changed:
            self._absorb(params, given, changed)
        elif self.local_F is not None and self.reduced_S is not None and self._versions() != self._seen_versions:
            self._forget_zeroed(self.reduced_S)

    def _versions(self) -> list[int]:
        """Count the writes to the local part: by its own counter, and by those of gradients that have one of their own.

        Where torch refuses a full gradient for a sharded parameter, what users hold shares the memory and nothing else.
        """
        if self.local_F is None:
            return []
        return [
            tensor._version
            for tensor in (self.local_F, *self._given)
            if tensor is not None and not tensor.is_inference()
        ]

    def _remember_local(self) -> None:
        """Remember the local part as it is now: later differences are the user's."""
        self._seen_versions = self._versions()
        both = self.local_F is not None and self.reduced_S is not None
        self._were_used = self._used() if both else None

    def _used(self) -> Tensor:
        """Return per original whether its local part is anything but zero, without waiting for the device."""
        assert self.local_F is not None  # the caller looked
        return torch.stack([view.any() for view in flat_views(self.local_F, self._handle.layout)])

    def _forget_zeroed(self, reduced_S: Tensor) -> None:
        """Users saw the local part only. What they zeroed in place means "forget this gradient", the reduced part with it.

        Of several originals one that was zero before is left alone: whether it was zeroed or not used cannot be known.
        """
        used = self._used()
        before = used if self._were_used is None else self._were_used
        are_used, were_used = torch.stack([used, before]).tolist()  # the one place where the host waits
        if not any(are_used):
            self.local_F = self.reduced_S = None
        elif self._many:
            for piece, now, earlier in zip(self._originals.pieces_of(reduced_S), are_used, were_used):
                if earlier and not now:
                    piece.zero_()
        self._remember_local()

    def _absorb(self, params: Sequence[Tensor], given: Sequence[Tensor | None], changed: list[int]) -> None:
        if all(param.grad is None for param in params):
            self.forget()
            return
        target = self._target(params, changed)
        pieces = self._originals.pieces_of(self.reduced_S) if self._many and self.reduced_S is not None else []
        for index in changed:
            grad, view = params[index].grad, target[index]
            if grad is None:
                view.zero_()
                if pieces:
                    pieces[index].zero_()  # what users saw was the local part; they drop all of it
            elif grad.numel() or view.numel():
                self._check(index, grad, view)
                view.copy_(grad)
        self._given = [param.grad for param in params]
        self._given_ptrs = [0 if grad is None else grad.data_ptr() for grad in self._given]
        self._remember_local()

    def _target(self, params: Sequence[Tensor], changed: list[int]) -> list[Tensor]:
        """Return where replaced gradients are copied to, making a reduced part when there was no gradient."""
        handle = self._handle
        converted = [params[index].grad for index in changed if params[index].grad is not None]
        if self.local_F is not None:
            flat = self.local_F
            return flat_views(flat, handle.layout) if self._many else [flat[: handle.layout.numel]]
        dtypes = {grad.dtype for grad in converted if grad is not None}
        if self.reduced_S is None:
            dtype = dtypes.pop() if len(dtypes) == 1 else handle.precision.original
            self.reduced_S = torch.zeros(handle.shard_map.shard_numel, dtype=dtype, device=handle.shard_S.device)
        return self._originals.pieces_of(self.reduced_S) if self._many else [self.reduced_S]

    @property
    def _many(self) -> bool:
        return self._originals.use_orig_params

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
        handle = self._handle
        params = self._originals.params if self._originals.use_orig_params else [handle.flat_param]
        if self._given and all(param.grad is None for param in params):
            self.absorb()

    def forget(self) -> None:
        """Drop both parts and what users were given."""
        self.reduced_S = self.local_F = None
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
