"""Parameters that may share one flat parameter, and what it holds at first."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fsdp_ref.errors import FlattenError, listing
from fsdp_ref.handle.marked_parameter import FlatParameter
from fsdp_ref.layout import FlatLayout, ShardMap
from fsdp_ref.storage.views import ManagedParam, flat_views, gap_views

PADDING_VALUE = 42
"""Written into gaps at flattening: a result that depends on padding shows it."""

ALIGNMENT_BYTES = 16


def check_params(params: Sequence[nn.Parameter], names: Sequence[str], *, use_orig_params: bool) -> None:
    """Refuse parameters that cannot be flattened together.

    Raises:
        FlattenError: an empty list, a flat parameter, a fake tensor, a dtype that is not floating point, or (without original
            parameters) differing ``requires_grad``; or differing dtypes. Lists every offender.
    """
    # Each refusal lists all offenders, so that one run shows what to change.
    if not params:
        raise FlattenError("FlatHandle: expected parameters to flatten, got an empty parameter list. Make no handle.")
    flat = [name for param, name in zip(params, names) if isinstance(param, FlatParameter)]
    if flat:
        raise FlattenError(f"Cannot flatten a `FlatParameter`: got {listing(flat)}. A unit holds it already.")
    integer = [f"{n} ({p.dtype})" for p, n in zip(params, names) if not (p.is_floating_point() or p.is_complex())]
    if integer:
        raise FlattenError(
            f"Cannot flatten integer dtype tensors: got {listing(integer)}. Register them as buffers or ignore them."
        )
    complexes = [f"{n} ({p.dtype})" for p, n in zip(params, names) if p.is_complex()]
    if complexes:
        raise FlattenError(f"Cannot flatten complex dtype tensors: got {listing(complexes)}. Ignore them.")
    fake = [name for param, name in zip(params, names) if type(param.data).__module__.startswith("torch._subclasses")]
    if fake:
        raise FlattenError(
            f"Cannot flatten fake tensors: expected values, or the meta device, got {listing(fake)}. "
            "Build the model under torch.device('meta') and pass param_init_fn, or give modules reset_parameters()."
        )
    if len({param.dtype for param in params}) > 1:
        got = listing(f"{n}: {p.dtype}" for p, n in zip(params, names))
        raise FlattenError(f"Must flatten tensors with uniform dtype but got {got}. Wrap them in separate units.")
    if not use_orig_params and len({param.requires_grad for param in params}) > 1:
        got = listing(f"{n}: {p.requires_grad}" for p, n in zip(params, names))
        raise FlattenError(
            "Must flatten tensors with uniform `requires_grad` when `use_orig_params=False` but got "
            f"{got}. Pass use_orig_params=True, or wrap frozen parameters separately."
        )


def build_layout(params: Sequence[ManagedParam], compute: torch.dtype | None, ranks: int) -> FlatLayout:
    """Place the parameters one after the other; with ``compute`` aligned, and padded to a multiple of ``ranks``.

    Only with original parameters are there gaps: views of the flat parameter become what optimizers and kernels see,
    and 16 bytes, measured in the dtype of computation, keep them as aligned as torch's own allocations.
    """
    aligned = 1 if compute is None else max(1, ALIGNMENT_BYTES // compute.itemsize)
    specs = [managed.spec() for managed in params]
    return FlatLayout.build(specs, alignment_numel=aligned, pad_to_multiple=1 if compute is None else ranks)


def flatten(tensors: Sequence[Tensor], layout: FlatLayout, device: torch.device) -> Tensor:
    """Return the flat tensor of ``tensors``, with gaps and tail marked by :data:`PADDING_VALUE`."""
    if len(tensors) != len(layout):
        raise FlattenError(f"flatten: expected {len(layout)} tensors, got {len(tensors)}. Pass one each.")
    dtype = tensors[0].dtype if tensors else torch.float32
    flat = torch.empty(layout.numel, dtype=dtype, device=device)
    with torch.no_grad():
        for view, tensor in zip(flat_views(flat, layout), tensors):
            view.copy_(tensor.detach())
        # 42 and not zero: zeros would hide a result that reads them.
        for gap in gap_views(flat, layout):
            gap.fill_(PADDING_VALUE)
    return flat


def cut_shard(flat: Tensor, shard_map: ShardMap, rank: int) -> Tensor:
    """Return a copy of ``rank``'s shard of ``flat``, padded on the right with zeros to the common size."""
    # A copy: the flat tensor of the whole unit is dropped when the caller returns, and its memory serves the next unit.
    shard = torch.zeros(shard_map.shard_numel, dtype=flat.dtype, device=flat.device)
    span = shard_map.shard_span(rank)
    shard[: span.numel].copy_(flat[span.as_slice()])
    return shard
