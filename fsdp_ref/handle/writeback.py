"""Takes over the users' changes of parameters since the last pass.

Between iterations users replace a parameter's data, put another ``nn.Parameter`` on a module, or cast the whole
model. Before each gather those changes are copied into the shard (or refused, by name). In-place edits need nothing:
what users hold *is* the shard.

[Note: edits in forward] Modules clip weights, bound norms or move codebooks in their forward. They see full parameters, which
are freed afterwards. In-place changes raise the counters of the views that forward computes with, and are written back when the
unit's forward ends (:func:`write_back`): each rank keeps its own piece, and the next gather gives every rank the whole. That is
right only if all ranks made the same change. A change by way of ``.data`` raises no counter and is lost with the buffer.
Guards look at both (``fence.wire_order``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from fsdp_ref.compat import storage_key
from fsdp_ref.errors import (
    FsdpRuntimeError,
    ParametersChangedError,
    SharedParameterError,
    WritebackError,
    listing,
)
from fsdp_ref.handle.flat_handle import FlatHandle
from fsdp_ref.handle.originals import Shown, guard_param
from fsdp_ref.storage.memory import another_home
from fsdp_ref.storage.views import Placeholder, mark_flattened


def absorb_params(handle: FlatHandle) -> bool:
    """Copy what the user changed into the shard; return whether anything was.

    Raises:
        WritebackError: a parameter was replaced by one of another shape, or in a unit with one flat parameter.
        SharedParameterError: a tied parameter was replaced in some of its places only, or two were tied.
    """
    # Modules show views or a user's buffer then: what differs from the shard is not an assignment.
    if handle.originals.shown is Shown.COMPUTING or handle.originals.shown is Shown.SUMMONED:
        return False
    if torch.is_inference_mode_enabled():
        # What becomes the shard now outlives this evaluation, and is trained.
        with torch.inference_mode(False), torch.no_grad():
            return _absorb(handle)
    return _absorb(handle)


def _absorb(handle: FlatHandle) -> bool:
    originals = handle.originals
    # In-place edits first: they lie in the full buffer, and replaced data is compared with it.
    keep_full_edits(handle)
    if not originals.use_orig_params:
        changed = _absorb_flat(handle)
    else:
        replaced = not originals.unchanged()
        if replaced:
            _adopt_replaced(handle)
        changed = _absorb_data(handle) or replaced
    if changed:
        handle.streams.gather_after_compute()  # the shard was written to on the current stream just now
    return changed


def keep_full_edits(handle: FlatHandle) -> None:
    """Copy what users changed in place, while originals were shown in full, into the shard: the full buffer is freed."""
    if handle.originals.shown is not Shown.FULL:
        return
    then, now = handle.versions.of_buffer, handle.versions.now()
    values = {index: handle.originals.params[index].data for index in range(len(now)) if then[index] != now[index]}
    values = {index: value for index, value in values.items() if _same_memory(value, handle.compute_views()[index])}
    if values:
        with torch.inference_mode(False), torch.no_grad():
            _copy_full(handle, values)
        handle.streams.gather_after_compute()


def check_unchanged(handle: FlatHandle) -> None:
    """Check that parameters which stayed unsharded since forward are the ones that forward used.

    Raises:
        ParametersChangedError: they were replaced.
    """
    originals = handle.originals
    if originals.shown is Shown.COMPUTING or originals.shown is Shown.SUMMONED:
        return
    if not originals.use_orig_params:
        changed = ["the flat parameter"] if handle.flat_param.data_ptr() != handle.shard_S.data_ptr() else []
    else:
        views = handle.compute_views() if originals.shown is Shown.FULL else originals.shard_views()
        changed = [
            fqn
            for fqn, index, value in originals.site_values()
            if value is not originals.params[index] or not _same_memory(originals.params[index], views[index])
        ]
    if changed:
        raise ParametersChangedError(
            "FSDP does not support changing the parameters between forward and backward: expected the parameters that "
            f"forward of {handle.name!r} used, got others for {listing(changed)}. Replace them before forward or after "
            "backward."
        )


def _same_memory(param: Tensor, view: Tensor) -> bool:
    if param.shape != view.shape:
        return False
    # A rank without elements of a parameter must notice the same changes as the others, which gather again.
    return param.data_ptr() == view.data_ptr() if view.numel() else storage_key(param) == storage_key(view)


def refuse_other_device(handle: FlatHandle, device: torch.device) -> None:
    """Refuse a unit whose parameters were moved as a whole: it computes, and has its groups, where it was made.

    Raises:
        FsdpRuntimeError: ``device`` is not where the shard is.
    """
    if device != handle.shard_S.device:
        raise FsdpRuntimeError(
            f"An FSDP-managed module unexpectedly has parameters on {device} ({handle.name or handle.fqns[0]!r}): expected "
            f"{handle.shard_S.device}, got a move after sharding. Move it back; pass device_id to shard on a device."
        )


def _absorb_flat(handle: FlatHandle) -> bool:
    flat = handle.flat_param
    # Before the comparison: a move changes the address, too.
    refuse_other_device(handle, flat.device)
    if not handle.originals.unchanged():
        given = (fqn for fqn, _, value in handle.originals.site_values() if not isinstance(value, Placeholder))
        raise WritebackError(
            f"A parameter was assigned in a unit with one flat parameter ({handle.name!r}): expected placeholders, got values at "
            f"{listing(given)}. Assign before sharding or inside summon_full_params, or use use_orig_params=True."
        )
    if flat.data_ptr() == handle.shard_S.data_ptr() and flat.dtype == handle.shard_S.dtype:
        return False
    if flat.shape != handle.shard_S.shape:
        _refuse_shape(handle, [("the flat parameter", flat, handle.shard_S)])
    new = flat.data
    _make_new_shard(handle, new.dtype)
    # Copied, not adopted: the user's tensor may be a view of something that lives and changes.
    with torch.no_grad():
        handle.shard_S.copy_(new)
    handle.versions.count([0])
    return True


def _adopt_replaced(handle: FlatHandle) -> None:
    """Take parameters that the user put in place of originals as the new originals."""
    originals = handle.originals
    shown: dict[int, list[tuple[str, object]]] = {}
    for fqn, index, value in originals.site_values():
        shown.setdefault(index, []).append((fqn, value))
    owners = {id(param): index for index, param in enumerate(originals.params)}
    # A tied parameter is replaced at all of its places, by one object, and by none that is an original of this unit.
    problems = [
        fqn
        for index, places in shown.items()
        for fqn, value in places
        if not isinstance(value, nn.Parameter) or value is not places[0][1] or owners.get(id(value), index) != index
    ]
    if problems:
        raise SharedParameterError(
            f"Changing shared parameters is not supported yet: expected the parameters that {handle.name!r} was "
            f"made with, got others at {listing(problems)}. Tie or untie parameters before sharding."
        )
    for index, places in shown.items():
        value = places[0][1]
        if isinstance(value, nn.Parameter) and value is not originals.params[index]:
            mark_flattened(value, sharded=handle.sharded)
            guard_param(value, handle.fqns[index])
            # While both are known: the new object has a counter of its own, which goes on from the old one's.
            handle.versions.adopted(index, originals.params[index], value)
            originals.params[index] = value


def _absorb_data(handle: FlatHandle) -> bool:
    """Copy data that is not the shard's own memory into the shard."""
    originals = handle.originals
    full = originals.shown is Shown.FULL
    expected = handle.compute_views() if full else originals.shard_views()
    changed = [
        index
        for index, (param, view) in enumerate(zip(originals.params, expected, strict=True))
        if not _same_memory(param, view) or param.dtype != view.dtype
    ]
    if not changed:
        return False
    devices = {param.device for param in originals.params}
    # All of them: the whole module was moved. A single one on another device is copied like any value.
    if len(devices) == 1:
        refuse_other_device(handle, devices.pop())
    values = {index: originals.params[index].data for index in changed}
    bad = [index for index in changed if values[index].shape != expected[index].shape]
    if bad:
        _refuse_shape(handle, [(handle.fqns[index], values[index], expected[index]) for index in bad])
    dtypes = {value.dtype for value in values.values()}
    # All of them to one other dtype: the model was cast. Some of them: values to be copied into the dtype that is there.
    cast = not full and len(changed) == len(originals.params) and len(dtypes) == 1
    _make_new_shard(handle, dtypes.pop() if cast else handle.shard_S.dtype)
    with torch.no_grad():
        if full:
            handle.exchange_buffer()
            _copy_full(handle, values)
        else:
            for index, value in values.items():
                originals.shard_views()[index].copy_(value)
    # The copy into the shard raised no counter of the user's objects: passes that are open must learn of it here.
    handle.versions.count(changed)
    originals.show_sharded(anew=True)
    return True


def _make_new_shard(handle: FlatHandle, dtype: torch.dtype) -> None:
    """Give the handle a shard of its own: the user may hold the memory of the old one, and put it back with its values.

    ``kept = p.data; p.data = average; evaluate(); p.data = kept`` must train on from ``kept``.
    """
    if dtype == handle.shard_S.dtype:
        handle.replace_shard(another_home(handle.shard_S, dtype))
    else:
        handle.set_precision(dtype)


def _copy_full(handle: FlatHandle, values: dict[int, Tensor]) -> None:
    """Copy this rank's pieces of full-sized values into the shard, while originals are shown in full."""
    views = handle.compute_views()
    # Every rank is taken to have assigned the same full values: each keeps its own piece, and nothing is sent.
    for index, value in values.items():
        # The full buffer is idle: it is filled, no gather writes to it, and nothing computes with it.
        views[index].copy_(value)
    write_back(handle, values)


def write_back(handle: FlatHandle, indices: Iterable[int]) -> None:
    """Copy this rank's pieces of originals from the full buffer into the shard."""
    if not handle.needs_buffer:
        return  # what is computed with is the shard itself
    targets, sources = handle.originals.shard_views(), handle.compute_views()
    start = handle.shard_map.shard_span(handle.shard_rank).start
    for index in indices:
        target, source = targets[index], sources[index]
        if handle.sharded:
            # By the flat buffer: a piece of the shard may begin and end inside a parameter of any strides.
            offset, numel = handle.originals.pieces.get(index, (0, 0))
            source = handle.full_F()[start + offset : start + offset + numel]
        if target.dtype != source.dtype:
            # From lower precision only what is not the rounded value of before.
            target_there = target.to(source.device)
            source = torch.where(target_there.to(source.dtype) == source, target_there, source)
        target.copy_(source)


def _refuse_shape(handle: FlatHandle, bad: Sequence[tuple[str, Tensor, Tensor]]) -> None:
    """Refuse parameters: name, what was assigned, and what has the present shape."""
    raise WritebackError(
        f"Cannot writeback when the parameter shape changes ({handle.name!r}): expected "
        f"{listing(f'{fqn}: {tuple(wanted.shape)}' for fqn, _, wanted in bad)}, got "
        f"{listing(f'{fqn}: {tuple(given.shape)}' for fqn, given, _ in bad)}. Assign a tensor of the parameter's "
        f"current (sharded) shape, or edit it inside summon_full_params."
    )
