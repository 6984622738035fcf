"""How do users see full, averaged gradients next to full parameters?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fsdp_ref.handle.flat_handle import FlatHandle
from fsdp_ref.storage.views import flat_views, set_grad


class FullGradients:
    """The gathered gradient of one handle, shown on its summoned originals.

    A rank without a gradient contributes zeros, unless no rank has one: then every gradient is None.
    """

    def __init__(self, handle: FlatHandle) -> None:
        self._handle = handle
        self._full_F: Tensor | None = None

    def gather(self) -> None:
        """Gather the reduced part.

        Collectives:
            A maximum of one flag, then (when any rank has a gradient) an all-gather, over the shard group.
        """
        handle = self._handle
        grads = handle.grads
        if not handle.sharded:
            self._full_F = grads.local_F if grads.local_F is not None else grads.reduced_S
            return
        has = torch.tensor([grads.reduced_S is not None], dtype=torch.int32, device=handle.config.device)
        handle.collectives.all_reduce(has, handle.groups.shard, handle.name, op="max").wait()
        if not has.item():
            self._full_F = grads.local_F
            return
        dtype = handle.precision.grad
        part_S = (
            torch.zeros(handle.shard_map.shard_numel, dtype=dtype, device=handle.config.device)
            if grads.reduced_S is None
            else grads.reduced_S.to(handle.config.device, dtype)
        )
        self._full_F = torch.empty(handle.shard_map.padded_numel, dtype=dtype, device=handle.config.device)
        handle.gather_into(self._full_F, part_S)

    def show(self, params: Sequence[nn.Parameter]) -> None:
        """Set ``.grad`` of summoned parameters."""
        views = [None] * len(params) if self._full_F is None else flat_views(self._full_F, self._handle.layout)
        for param, view in zip(params, views):
            set_grad(param, view if param.requires_grad else None)

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
                handle.grads.replace_reduced(self._full_F[span.as_slice()])

    def close(self, params: Sequence[nn.Parameter]) -> None:
        """Take the full gradients off; the originals' own are published again once they are sharded."""
        for param in params:
            set_grad(param, None)
        self._handle.originals.show_sharded()
        self._handle.grads.publish()
        self._full_F = None
