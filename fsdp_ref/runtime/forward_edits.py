"""What becomes of a change that a module's forward makes to its own parameters?

Modules clip weights, bound norms or move codebooks in forward. They see full parameters, which are freed afterwards.

[Note: edits in forward] In-place changes raise the counters of the views that forward computes with. They are written
back when the unit's forward ends: each rank keeps its own piece, and the next gather gives every rank the whole. Right
only if all ranks made the same change, which the fingerprint of ``wire_order`` compares. A change by way of ``.data``
raises no counter: the part of the buffer that this rank owns is compared with its shard, on the device, and a difference
is told with the same fingerprint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from fsdp_ref.errors import ParametersChangedError, explain
from fsdp_ref.naming import join_fqn
from fsdp_ref.runtime.wire_order import EDIT

if TYPE_CHECKING:
    from fsdp_ref.autograd.graph_ties import PassRecord
    from fsdp_ref.handle.flat_handle import FlatHandle
    from fsdp_ref.runtime.root import Root
    from fsdp_ref.runtime.unit import Unit

_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def refuse_tracked(unit: Unit, record: PassRecord) -> None:
    """Refuse an in-place change of a trained parameter that autograd tracked, as it does in one process.

    Raises:
        ParametersChangedError: there was one.
    """
    handle = unit.handle
    assert handle is not None  # only units with parameters have records
    bad = [handle.fqns[index] for index in record.edited() if record.tracked_anew(index)]
    if bad:
        raise ParametersChangedError(
            explain(
                f"forward of {unit!r}: a leaf Variable that requires grad is being used in an in-place operation",
                expected="changes of parameters under torch.no_grad()",
                got=", ".join(join_fqn(unit.name, fqn) for fqn in bad),
                remedy="Edit the parameter under torch.no_grad(), or compute a new tensor from it",
            )
        )


def keep(unit: Unit, root: Root, record: PassRecord) -> None:
    """Write what forward changed in place to the shard, and note what it changed otherwise."""
    handle = unit.handle
    assert handle is not None  # only units with parameters have records
    edited = record.edited()
    with torch.inference_mode(False), torch.no_grad():
        if edited:
            mark = _write_back(handle, record, edited)
            root.wire_order.notes.append((unit, EDIT))
            known = root.wire_order.marks.get(unit)
            root.wire_order.marks[unit] = mark if known is None else known * 31 + mark
        # Offloaded shards would have to be fetched: there only what raises a counter is noticed.
        if handle.needs_buffer and handle.shard_S.device == handle.config.device:
            differs = _differs(handle)
            known = root.wire_order.data_edits.get(unit)
            root.wire_order.data_edits[unit] = differs if known is None else known.logical_or_(differs)


def _write_back(handle: FlatHandle, record: PassRecord, edited: list[int]) -> Tensor:
    """Return a fingerprint of the edited parameters, as full as all ranks have them."""
    views = handle.compute_views()
    if handle.needs_buffer:
        span = handle.shard_map.shard_span(handle.shard_rank)
        own = handle.full_F()[span.start : span.stop]
        pieces = handle.originals.pieces_of(handle.shard_S) if not handle.sharded else None
        for index in edited:
            if pieces is not None:
                _keep_changed(pieces[index], views[index])
            elif index in handle.originals.pieces:
                start, numel = handle.originals.pieces[index]
                _keep_changed(handle.shard_S[start : start + numel], own[start : start + numel])
    record.accept_edits()
    handle.versions.count_in_pass(edited)
    handle.streams.gather_after_compute()  # the shard was written to on the current stream just now
    mark = torch.zeros((), dtype=torch.int64, device=views[0].device)
    for index in edited:
        mark = mark * 31 + _fingerprint(views[index]) * (2 * index + 1)
    return mark


def _keep_changed(target: Tensor, source: Tensor) -> None:
    """Copy; from lower precision only what is not the rounded value of before."""
    if target.dtype == source.dtype:
        target.copy_(source)
    else:
        target.copy_(torch.where(target.to(source.device, source.dtype) == source, target.to(source.device), source))


def _bits(flat: Tensor) -> Tensor:
    return flat.view(_INTEGERS.get(flat.element_size(), torch.int64))


def _fingerprint(view: Tensor) -> Tensor:
    """Return a number that depends on all bits of a tensor and on their places, on its device."""
    if not view.numel():
        return torch.zeros((), dtype=torch.int64, device=view.device)
    rows = _bits(view.contiguous().reshape(-1)).reshape(view.shape[0] if view.dim() else 1, -1)
    sums = rows.sum(1, dtype=torch.int64), rows.sum(0, dtype=torch.int64)
    odd = [torch.arange(1, 2 * len(each), 2, device=view.device) for each in sums]
    return (sums[0] * odd[0]).sum() * 31 + (sums[1] * odd[1]).sum()


def _differs(handle: FlatHandle) -> Tensor:
    """Return whether the part of the full buffer that this rank owns is another than its shard, bit by bit."""
    span = handle.shard_map.shard_span(handle.shard_rank)
    mine = handle.shard_S[: span.numel].to(handle.compute_dtype)
    return _bits(handle.full_F()[span.as_slice()]).ne(_bits(mine)).any()
