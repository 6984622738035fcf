"""Full parameters enter the autograd graph, and their gradient comes back.

One autograd node per unit and forward pass (:class:`TrackedParams`) hands out views of the full buffer. It runs in
backward exactly once all gradients of the unit's parameters are complete: autograd runs ready nodes in the reverse
order of their making, and this node is made before the unit's own operations. That is the "post-backward" moment; no
hook on an accumulator is needed, and unused parameters arrive as None.

[Note: chosen parameters] Users name the tensors that they hold in ``backward(inputs=...)``, and autograd runs only what
leads to these. The node therefore has them as inputs, and gives them no gradient: the runtime does, once it is reduced.

[Note: saved parameters] Autograd saves views of full parameters for backward, and FSDP frees them in between. While a
root runs forward, saved tensors are therefore packed: a view of a unit's buffer becomes a note of its place
    (:class:`SavedView`) and is recreated when backward needs it, gathering the parameters if they were freed. Backward may
so start anywhere: at a cached intermediate, at an in-place changed view of an output, twice, or in another order than
forward ran (pytorch issues 136861, 173709, 181832). Other saved tensors pass through; their version is checked as
autograd itself would (it does not, once hooks are in force). Those of parameters are checked by [Note: versions].
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from fsdp_ref import compat
from fsdp_ref.comm.tensor_parallel import is_dtensor, local_of, rebuilder
from fsdp_ref.errors import FsdpRuntimeError
from fsdp_ref.handle.versions import refuse_changed
from fsdp_ref.storage.views import alias

if TYPE_CHECKING:
    from fsdp_ref.handle.flat_handle import FlatHandle
    from fsdp_ref.runtime.unit import Unit

OnGradients: TypeAlias = "Callable[[Unit, tuple[Tensor | None, ...]], None]"


class TrackedParams(torch.autograd.Function):
    """Views of a unit's full parameters, tracked by autograd."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, unit: Unit, on_gradients: OnGradients, *held: Tensor) -> tuple[Tensor, ...]:
        """Return one view per original.

        Args:
            ctx: autograd's node.
            anchor: a tensor that requires grad and makes autograd keep the node.
            unit: whose parameters.
            on_gradients: what is called with the complete gradients.
            held: what users hold of them (see [Note: chosen parameters]).
        """
        handle = unit.handle
        # None stays None: zeros would make an unused parameter look used (see [Note: marks of use]).
        ctx.set_materialize_grads(False)
        # The tie and not the unit: the node may outlive the model, or be stored in it (see ``graph_ties``).
        ctx.tie = unit.graph.tie()
        ctx.on_gradients = on_gradients
        # Independent tensors, not views: in-place edits by a user's module must not trip over autograd's view rules.
        views = tuple(alias(view) for view in handle.compute_views())
        # Read for each pass: users freeze and thaw parameters between steps.
        trainable = handle.originals.trainable()
        ctx.mark_non_differentiable(*(view for view, wanted in zip(views, trainable) if not wanted))
        return views

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        """Hand the complete gradients to the runtime."""
        unit = ctx.tie.unit()
        # Gradients leave this node for a reduction that autograd does not know: there is no graph behind ``.grad``.
        if torch.is_grad_enabled():
            raise FsdpRuntimeError(
                "FSDP does not support gradients of gradients: expected backward without create_graph=True for the "
                f"parameters of {unit.name or 'the root'!r}. Use create_graph only for gradients of inputs."
            )
        ctx.on_gradients(unit, _chosen(ctx, unit, grads))
        # Nothing for the anchor and for what users hold: ``.grad`` is set by the runtime, once it is reduced.
        return (None,) * len(ctx.needs_input_grad)


def _chosen(ctx: Any, unit: Unit, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """Return the gradients, of the chosen parameters alone in ``backward(inputs=...)`` (see [Note: chosen parameters]).

    Raises:
        FsdpRuntimeError: the pass is one of ``torch.autograd.grad`` for such a parameter.
    """
    if unit.root is None or compat.pass_reaches(unit.root.anchor_node):
        return grads  # users cannot choose the anchor: whatever leads to leaves runs
    _, *held = ctx.next_functions
    try:
        chosen = [node is not None and compat.pass_reaches(node) for node, _ in held]
    # The engine refuses the question for a leaf whose gradient it hands out, as ``torch.autograd.grad`` wants it.
    except RuntimeError as error:
        raise FsdpRuntimeError(
            f"torch.autograd.grad for parameters of {unit.name or 'the root'!r}: expected backward, which reduces "
            "gradients over ranks into .grad, got a pass that returns them. Call backward(inputs=parameters)."
        ) from error
    if len(chosen) < len(grads):
        return grads  # one flat parameter
    return tuple(grad if wanted else None for grad, wanted in zip(grads, chosen))


class _Values:
    """The version of a parameter that autograd saved: like autograd in one process, we refuse other values."""

    __slots__ = ("_handle", "_position", "_saved", "_version", "_versions")

    def __init__(self, handle: FlatHandle, view: Tensor) -> None:
        # Weakly: a graph that is stored in a module must not keep it alive. And without the view's node, for the same reason.
        self._handle = weakref.ref(handle)
        self._saved = view.detach()
        self._version = compat.version_of(view)
        self._versions = handle.versions.of_buffer  # of this pass: later gathers make lists of their own
        self._position = int(view.storage_offset() - handle.full_F().storage_offset())

    def check(self) -> None:
        """Check that the parameter still has them.

        Raises:
            ParametersChangedError: it was changed in place, by the forward that saved it or later.
        """
        handle = self._handle()
        # The model was deleted, so nothing can change a parameter.
        if handle is None:
            return
        handle.versions.check(self._versions, self._position)
        if self._version != compat.version_of(self._saved):
            refuse_changed(handle, handle.versions.owner(self._position))


class SavedView:
    """A view of a unit's full parameter that autograd saved, without its memory."""

    __slots__ = ("dtype", "full_precision", "offset", "rebuild", "size", "stride", "tie", "values")

    def __init__(self, unit: Unit, view: Tensor, rebuild: Callable[[Tensor], Tensor] | None) -> None:
        # The tie: while the graph lives this keeps the unit that has to gather again.
        self.tie = unit.graph.tie()
        self.values = _Values(unit.handle, view)
        self.dtype = view.dtype
        self.size = view.size()
        self.stride = view.stride()
        self.offset = view.storage_offset()
        self.full_precision = unit.handle.full_precision
        self.rebuild = rebuild

    def restore(self, demand: Callable[[Unit], None]) -> Tensor:
        """Return the view, after ``demand(unit)`` made its memory valid if it was not."""
        unit = self.tie.unit()
        handle = unit.handle
        # First: a refused value must not cost a gather, which other ranks would have to join.
        self.values.check()
        there = handle.unsharded and self.full_precision == handle.full_precision
        if not compat.in_backward() and not there:
            # A user inspects the graph: the user gets a copy, and the unit stays as it is.
            return self._view(handle.gathered_copy(self.dtype))
        if self.full_precision != handle.full_precision:
            handle.set_full_precision(self.full_precision)
        if not handle.unsharded:
            # A collective: ranks that run the same backward ask for the same value at the same point.
            demand(unit)
        view = self._view(handle.full_F())
        # With create_graph the new graph keeps what it reads, and nothing would gather it again: give it its own copy.
        return view.clone() if torch.is_grad_enabled() or not compat.in_backward() else view

    def _view(self, flat_F: Tensor) -> Tensor:
        # On the same storage, by offset: the buffer was refilled in place, or this is a copy of the same layout.
        view = torch.empty(0, dtype=self.dtype, device=flat_F.device)
        view = view.set_(flat_F.untyped_storage(), self.offset, self.size, self.stride)
        return view if self.rebuild is None else self.rebuild(view)


class UnitsByStorage(dict[int, "Unit"]):
    """Units by the storage of their buffer."""

    __slots__ = ("__weakref__",)


def pack_with(units_by_storage: UnitsByStorage) -> Callable[[Tensor], Any]:
    """Return the pack hook of [Note: saved parameters] for the buffers in ``units_by_storage``.

    It knows them weakly: autograd keeps the hook for as long as what it packed, which may be stored in the module.
    """
    # A dictionary of its own class, for which Python allows a weak reference.
    known = weakref.ref(units_by_storage)

    def pack(tensor: Tensor) -> Any:
        spread = is_dtensor(tensor)
        # What lies in the buffer is the local tensor; the DTensor around it has no storage of its own.
        local = local_of(tensor) if spread else tensor
        if type(local) is not Tensor or local.layout is not torch.strided:
            # A parameter that no unit manages; other kinds of tensors count their own changes.
            return tensor, compat.version_of(tensor) if type(tensor) is nn.Parameter else -1
        # Without its node: an operation that saves its own output would otherwise hold itself, and never be freed.
        kept = tensor if tensor.is_leaf else tensor.detach()
        # By storage: modules save views of views (a transposed weight), which also lie in the unit's buffer.
        key = compat.storage_key(local)
        units = known()
        unit = None if units is None else units.get(key)
        if unit is not None and compat.storage_key(unit.handle.full_F()) == key:
            if unit.handle.needs_buffer:
                return SavedView(unit, local, rebuilder(tensor) if spread else None)
            return kept, _Values(unit.handle, local)  # nothing is gathered: its memory stays
        return kept, compat.version_of(kept)

    return pack


def unpack_with(demand: Callable[[Unit], None]) -> Callable[[Any], Tensor]:
    """Return the unpack hook of [Note: saved parameters]."""

    def unpack(packed: Any) -> Tensor:
        if type(packed) is SavedView:
            return packed.restore(demand)
        # -1: we do not count the changes of such a tensor.
        tensor, version = packed
        if type(version) is _Values:
            version.check()
        elif version not in {-1, compat.version_of(tensor)}:
            raise FsdpRuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"expected a {tensor.dtype} tensor of shape {tuple(tensor.shape)} at version {version}, got version "
                f"{tensor._version}. Enable anomaly detection to find the operation that failed to compute its gradient."
            )
        return tensor  # packed above

    return unpack
