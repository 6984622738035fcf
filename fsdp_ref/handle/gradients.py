"""What users see of a flat parameter's gradient, and what they do to it.

Users see the local part of the gradient while there is one, as DDP users do, and the reduced part otherwise (see
``accumulated``). They change gradients between passes: set them to None, zero them, replace them. :meth:`Gradients.absorb`
reads those changes before the values are used again, so what users see is the truth.

A flat parameter has one gradient for all of its originals, with zeros for unused ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fsdp_ref.errors import WritebackError, listing
from fsdp_ref.handle.accumulated import Accumulated, Uses
from fsdp_ref.handle.originals import Originals
from fsdp_ref.storage.views import flat_views, set_grad

if TYPE_CHECKING:
    from fsdp_ref.handle.flat_handle import FlatHandle


class Gradients:
    """The gradient of one flat parameter, in users' hands.

    Attributes:
        sum: its values.
    """

    def __init__(self, handle: FlatHandle, originals: Originals) -> None:
        self._handle = handle
        self._originals = originals
        self._many = originals.use_orig_params
        # The tensors whose ``.grad`` users see; one that a user puts in an original's place joins the same list.
        self._shown_params: Sequence[Tensor] = originals.held
        config = handle.config
        self.sum = Accumulated(
            handle.shard_map, handle.shard_rank, handle.precision, config.device, offloads=config.offload
        )
        # What users were given: the gradient object per tensor, where its memory was, and how often it had been written to.
        self._given: list[Tensor | None] = []
        self._given_ptrs: list[int] = []
        self._given_versions: list[int] = []
        # Digests of the local part as published while a reduced part existed; on the device, so that the host does not wait.
        self._given_digests: Tensor | None = None

    @property
    def reduced_S(self) -> Tensor | None:
        """The reduced part of the values."""
        return self.sum.reduced_S

    @property
    def local_F(self) -> Tensor | None:
        """The local part of the values."""
        return self.sum.local_F

    # ------------------------------------------------------------------ adding

    def add_local(self, grads: Sequence[Tensor | None]) -> None:
        """Add this rank's full gradients (one per original, None for unused) to the local part."""
        # First: what a user did to the gradients that are shown is older than this backward.
        self.absorb()
        more = self.sum.local_F is not None
        self.sum.add_local(grads)
        if more:
            # Written by us: zeros that a rank without rows adds are not a user's zero_grad.
            self._remember()

    def take_local(self, grads: Sequence[Tensor | None] = ()) -> tuple[Tensor | None, list[bool]]:
        """Return the local part with ``grads`` added, and per original whether it is in there; forget both.

        It is about to be reduced. The part is None where there is none; then ``grads`` are not in it.
        """
        # A user may have zeroed or replaced what no_sync left: that, and not what we remember, is reduced.
        self.absorb()
        if self.sum.local_F is None:
            return None, [grad is not None for grad in grads]
        if grads:
            self.add_local(grads)
        return self.sum.take_local()

    def stamp(self, flat_F: Tensor, used: Sequence[bool]) -> None:
        """Mark in what is about to be reduced which originals this rank used; one flat gradient needs no marks."""
        if self._many:
            self.sum.marks.stamp(flat_F, used)

    def uses_in(self, sum_S: Tensor, used: Sequence[bool]) -> Uses:
        """Return which parameters have a gradient in a reduced sum: for this rank by ``used``, for other ranks by its marks."""
        return self.sum.uses_in(sum_S, used, self._originals.trainable()) if self._many else Uses(used)

    def add_reduced(self, grad_S: Tensor, uses: Uses | None = None) -> None:
        """Add a reduced gradient, which is this object's from now on; without ``uses`` all that trains has one."""
        # First, as above: a gradient that a user set to None must not come back with this one.
        self.absorb()
        more = self.sum.reduced_S is not None
        self.sum.add_reduced(grad_S, uses or Uses(self._originals.trainable()))
        if more:
            self._remember()

    def drop_arriving(self) -> None:
        """Forget a reduced part that may still be in flight: the pass failed, and its result is not awaited."""
        self.sum.drop_arriving(self._originals.trainable())

    def spoil(self, problem: Tensor) -> None:
        """Make the reduced part NaN where ``problem``, one boolean on its device, says so; the host does not read it."""
        if self.sum.reduced_S is not None and problem.device == self.sum.reduced_S.device:
            # On the device: reading ``problem`` would stop the host once in every step.
            self.sum.reduced_S.masked_fill_(problem, float("nan"))
            self._remember()

    # ------------------------------------------------------------------ what users see

    def publish(self) -> None:
        """Give users the gradients: the local part while there is one, else the reduced part, else nothing."""
        values, layout = self.sum, self._handle.layout
        values.arriving = False  # the host has waited for copies by now
        if not self._many:
            shown = values.reduced_S if values.local_F is None else values.local_F[: layout.numel]
            self._give([shown])
            return
        # Here the host waits for the device, once per pass and where this rank does not know by itself.
        values.read_uses()
        grads: list[Tensor | None] = [None] * len(self._shown_params)
        if values.local_F is not None:
            # One that only the reduced part has shows zeros of its own shape until the two are one.
            for index, view in enumerate(flat_views(values.local_F, layout)):
                grads[index] = view if values.used[index] or values.local_used[index] else None
        elif values.reduced_S is not None:
            for index, piece in enumerate(self._originals.pieces_of(values.reduced_S)):
                grads[index] = piece if values.used[index] and self._originals.present(index) else None
        self._give(grads)

    def publish_failed(self) -> None:
        """Give users the gradients that a failed pass has completed, unless they may have cleared them already.

        On a device autograd's own thread runs the pass, and its failure is noticed when users may have gone on: cleared
        gradients must not come back. A parameter without a gradient gets none.
        """
        if self._handle.config.device.type != "cpu" and all(param.grad is None for param in self._shown_params):
            # They cleared all of it: that is how ``zero_grad`` looks from here.
            self.forget()
        else:
            self.publish()

    def _give(self, grads: Sequence[Tensor | None]) -> None:
        for param, grad in zip(self._shown_params, grads, strict=True):
            set_grad(param, grad)
        self._take_as_given()

    def absorb(self) -> None:
        """Read what users did to the gradients since they were published.

        Raises:
            WritebackError: a gradient was replaced by one of another shape, or changed while a part of it was not shown.
        """
        changed = []
        params = self._shown_params
        # Nothing was published yet, so an existing gradient is a user's.
        given, pointers = self._given or [None] * len(params), self._given_ptrs
        for index, param in enumerate(params):
            grad = param.grad
            # The address too: ``p.grad.data = other`` keeps the object.
            if grad is not given[index] or (grad is not None and grad.data_ptr() != pointers[index]):
                changed.append(index)
        written = (self.sum.both or self.sum.rest_S is not None) and self._versions() != self._given_versions
        digests = self._given_digests  # before replaced gradients are taken in, which notes what is there then
        if not (changed or written or digests is not None):
            return
        # A forward under inference_mode() may be the first to look; what is made here later backwards add to.
        with torch.inference_mode(False), torch.no_grad():
            if changed:
                self._absorb(params, changed)
            if written:
                self.sum.rest_S = None
            # After the replaced gradients were taken in: a replaced local part may be zero as well.
            if self.sum.both and digests is not None:
                self._read_partial_edits(digests, written=written or bool(changed))

    def _versions(self) -> list[int]:
        """Count the writes to what users see: by its own counter, and by those of gradients that have one of their own.

        Where torch refuses a full gradient for a sharded parameter, what users hold shares the memory and nothing else.
        """
        seen = self.sum.reduced_S if self.sum.local_F is None else self.sum.local_F
        return [t._version for t in (seen, *self._given) if t is not None and not t.is_inference()]

    def _remember(self) -> None:
        """Remember the gradients as they are now: later differences are the user's."""
        # Counting costs time in every pass, and only this case needs it.
        if self.sum.both or self.sum.rest_S is not None:
            self._given_versions = self._versions()
        self._given_digests = self.sum.local_digests() if self.sum.both else None

    def _read_partial_edits(self, given: Tensor, *, written: bool) -> None:
        """While both parts exist users see the local part alone. If they zero it, zero the reduced part as well.

        Of several originals one that was zero before is left alone: whether it was zeroed or not used cannot be known. Any
        other edit would change one part of two: it is refused. ``p.grad.data.mul_(x)`` raises no counter: digests tell.
        """
        reduced_S = self.sum.reduced_S
        assert reduced_S is not None  # the caller looked
        now = self.sum.local_digests()
        # The host waits here, once for all of them.
        is_nonzero, was_nonzero, edited = torch.stack([now[0] != 0, given[0] != 0, now[1] != given[1]]).tolist()
        if not any(is_nonzero) and (written or any(edited)):
            self.sum.become_zeros()
            # At once: a backward that does not reach this unit shows nothing anew, and users have full-sized zeros.
            self.publish()
            return
        refused = [fqn for fqn, *is_ in zip(self._handle.fqns, is_nonzero, edited, strict=True) if all(is_)]
        if refused:
            raise WritebackError(
                f"gradients in {self._handle.name!r}: expected them untouched or zeroed while a part of each is reduced already "
                f"and not shown (a backward outside of no_sync(), then one inside), got others for {listing(refused)}. Run a "
                "backward outside of no_sync() before you edit gradients, or zero them."
            )
        if self._many:
            for piece, is_, was in zip(self._originals.pieces_of(reduced_S), is_nonzero, was_nonzero, strict=True):
                if was and not is_:
                    piece.zero_()
        self._remember()

    def _absorb(self, params: Sequence[Tensor], changed: list[int]) -> None:
        # ``zero_grad``: of both parts, since users cannot tell them apart.
        if all(param.grad is None for param in params):
            self.forget()
            return
        self.sum.rest_S = None
        target = self._target(params, changed)
        reduced_S, local_F = self.sum.reduced_S, self.sum.local_F
        pieces = self._originals.pieces_of(reduced_S) if self._many and reduced_S is not None else []
        for index in changed:
            grad, view = params[index].grad, target[index]
            if grad is None:
                view.zero_()
                self.sum.used[index] = self.sum.local_used[index] = False
                if pieces:
                    pieces[index].zero_()  # what users saw was the local part; they drop all of it
            elif grad.numel() or view.numel():
                self._check(index, grad, view)
                view.copy_(grad)
                (self.sum.used if local_F is None else self.sum.local_used)[index] = True
        self._take_as_given()

    def _take_as_given(self) -> None:
        # The objects, not their ids: an id may be given out again to the gradient that a user puts in its place.
        self._given = [param.grad for param in self._shown_params]
        self._given_ptrs = [0 if grad is None else grad.data_ptr() for grad in self._given]
        self._remember()

    def _target(self, params: Sequence[Tensor], changed: list[int]) -> list[Tensor]:
        """Return where replaced gradients are copied to, making a reduced part when there was no gradient."""
        layout, local_F = self._handle.layout, self.sum.local_F
        if local_F is not None:
            return flat_views(local_F, layout) if self._many else [local_F[: layout.numel]]
        # A user's own dtype is kept where it is one: low-precision gradients stay low (``keep_low_precision_grads``).
        dtypes = {grad.dtype for grad in (params[index].grad for index in changed) if grad is not None}
        reduced_S = self.sum.make_reduced(dtypes.pop() if len(dtypes) == 1 else self._handle.precision.original)
        return self._originals.pieces_of(reduced_S) if self._many else [reduced_S]

    def _check(self, index: int, grad: Tensor, view: Tensor) -> None:
        # By shape alone: another dtype or device is converted by the copy.
        if grad.shape == view.shape:
            return
        handle = self._handle
        fqn = handle.fqns[index] if self._many else "the flat parameter"
        raise WritebackError(
            f"gradient of {fqn} in {handle.name!r}: expected shape {tuple(view.shape)}, got {tuple(grad.shape)}. Cannot "
            "writeback when the gradient shape changes; assign one of the parameter's current shape."
        )

    def release(self) -> None:
        """Free the memory of gradients that users dropped (``zero_grad(set_to_none=True)``), before forward needs memory."""
        if self.sum.reduced_S is None and self.sum.local_F is None:
            return
        # Only what was shown can have been dropped: before it is published every ``.grad`` is None.
        if self._given and all(param.grad is None for param in self._shown_params):
            self.absorb()

    def forget(self) -> None:
        """Drop the values and what users were given."""
        self.sum.forget()
        # What users hold stays theirs: nothing of ours refers to that memory any more.
        self._given, self._given_ptrs, self._given_digests = [], [], None
