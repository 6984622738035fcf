"""Full, averaged gradients shown next to full parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fsdp_ref.handle.flat_handle import FlatHandle
from fsdp_ref.storage.views import flat_views, set_grad


class FullGradients:
    """The gathered gradient of one handle, shown on its summoned originals.

    A rank without a gradient contributes zeros. A parameter that no rank used has None (see [Note: marks of use]).
    """

    def __init__(self, handle: FlatHandle) -> None:
        self._handle = handle
        self._full_F: Tensor | None = None
        self._used: Sequence[bool] = ()

    def gather(self) -> None:
        """Gather the reduced part.

        Collectives:
            A maximum of one flag, then (when any rank has a gradient) an all-gather, over the shard group.
        """
        handle = self._handle
        grads = handle.grads
        if not handle.sharded or grads.local_F is not None:
            self._full_F = grads.local_F if grads.local_F is not None else grads.reduced_S
            self._used = [one or other for one, other in zip(grads.sum.used, grads.sum.local_used)]
        if not handle.sharded:
            return
        has = torch.tensor([grads.reduced_S is not None], dtype=torch.int32, device=handle.config.device)
        handle.collectives.all_reduce(has, handle.groups.shard, handle.name, op="max").wait()
        if not has.item():
            return
        dtype = handle.precision.grad
        part_S = torch.zeros(handle.shard_map.shard_numel, dtype=dtype, device=handle.config.device)
        if grads.reduced_S is not None:
            part_S.copy_(grads.reduced_S)
        grads.sum.marks.stamp(part_S, grads.sum.used, shard=True)
        self._full_F = torch.empty(handle.shard_map.padded_numel, dtype=dtype, device=handle.config.device)
        handle.gather_into(self._full_F, part_S)
        unused = grads.sum.marks.unused(self._full_F).tolist()
        by_any = {owner for owner, by_none in zip(grads.sum.marks.owners, unused) if not by_none}
        # A parameter without elements has no mark, and this rank's record for a parameter without a local piece may be old.
        params = handle.layout.params
        self._used = [i in by_any or (used and not params[i].numel) for i, used in enumerate(grads.sum.used)]

    def show(self, params: Sequence[nn.Parameter]) -> None:
        """Set ``.grad`` of summoned parameters."""
        views = [None] * len(params) if self._full_F is None else flat_views(self._full_F, self._handle.layout)
        for param, view, used in zip(params, views, self._used or [False] * len(params)):
            set_grad(param, view if used else None)

    def keep_edits(self, params: Sequence[nn.Parameter]) -> None:
        """Write this rank's piece of the edited gradients to the store."""
        handle = self._handle
        if self._full_F is None:
            if any(param.grad is not None for param in params):
                self._full_F = torch.zeros(
                    handle.shard_map.padded_numel, dtype=handle.precision.grad, device=handle.config.device
                )
            else:
                return
        with torch.no_grad():
            for param, view in zip(params, flat_views(self._full_F, handle.layout)):
                if param.grad is None:
                    view.zero_()
                elif param.grad.data_ptr() != view.data_ptr():
                    view.copy_(param.grad)
            span = handle.shard_map.shard_span(handle.shard_rank)
            if handle.grads.local_F is None:
                # A rank that was shown no gradient keeps its own.
                used = [param.grad is not None for param in params] or list(self._used)
                handle.grads.sum.replace_reduced(self._full_F[span.as_slice()], used)

    def close(self, params: Sequence[nn.Parameter]) -> None:
        """Take the full gradients off; the originals' own are published again once they are sharded."""
        for param in params:
            set_grad(param, None)
        self._handle.originals.show_sharded()
        self._handle.grads.publish()
        self._full_F = None
