"""Changes that a module's forward makes to its own parameters.

Modules clip weights, bound norms or move codebooks in forward. They see full parameters, which are freed afterwards.

[Note: edits in forward] In-place changes raise the counters of the views that forward computes with. They are written
back when the unit's forward ends: each rank keeps its own piece, and the next gather gives every rank the whole. That is
right only if all ranks made the same change. A change by way of ``.data`` raises no counter and is lost with the buffer.
Guards look at both (``fence.wire_order``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from fsdp_ref.autograd.graph_ties import PassRecord
    from fsdp_ref.handle.flat_handle import FlatHandle
    from fsdp_ref.runtime.root import Root
    from fsdp_ref.runtime.unit import Unit


def keep(unit: Unit, root: Root, record: PassRecord) -> None:
    """Write what forward changed in place to the shard, while the full parameters are still there."""
    handle = unit.handle
    edited = record.edited()
    # The shard outlives this pass, which may be an evaluation: what is written to it must be trainable.
    with torch.inference_mode(False), torch.no_grad():
        if edited:
            _write_back(handle, edited)
            record.accept_edits()
            handle.versions.count_in_pass(edited)
            handle.streams.gather_after_compute()  # the shard was written to on the current stream just now
            for look_at_edits in root.guards.edits_kept:
                look_at_edits(unit, edited)
        for look in root.guards.unit_ends:
            look(unit)


def _write_back(handle: FlatHandle, edited: list[int]) -> None:
    if not handle.needs_buffer:
        return  # forward computed with the shard itself
    views = handle.compute_views()
    span = handle.shard_map.shard_span(handle.shard_rank)
    own = handle.full_F()[span.start : span.stop]
    pieces = handle.originals.pieces_of(handle.shard_S) if not handle.sharded else None
    for index in edited:
        if pieces is not None:
            _keep_changed(pieces[index], views[index])
        elif index in handle.originals.pieces:
            start, numel = handle.originals.pieces[index]
            _keep_changed(handle.shard_S[start : start + numel], own[start : start + numel])


def _keep_changed(target: Tensor, source: Tensor) -> None:
    """Copy; from lower precision only what is not the rounded value of before."""
    if target.dtype == source.dtype:
        target.copy_(source)
    else:
        target.copy_(torch.where(target.to(source.device, source.dtype) == source, target.to(source.device), source))
