"""Compares the order in which ranks run units, before a mismatch hangs; only with torch's distributed debug level DETAIL.

In the first iteration every forward of a unit is announced to the other ranks before its parameters are gathered, so
that a mismatch is an error on every rank instead of a hang. Later iterations are compared with the first, locally: a
deviation is reported once. Source: ``torch.distributed.fsdp._exec_order_utils`` for the behaviour.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch

from fsdp_ref import compat
from fsdp_ref.comm.collectives import gather_objects
from fsdp_ref.errors import ExecutionOrderError, listing
from fsdp_ref.runtime.guards import Guard
from fsdp_ref.runtime.unit import Unit

if TYPE_CHECKING:
    from fsdp_ref.runtime.root import Root


class OrderCheck(Guard):
    """One tree's order; it warns once.

    Args:
        root: the tree.
    """

    def __init__(self, root: Root) -> None:
        super().__init__(root)
        self._warned = False

    def unit_begins(self, unit: Unit) -> None:
        """Compare the forward of ``unit``, just recorded, with the other ranks or with the first iteration.

        Raises:
            ExecutionOrderError: ranks disagree in the first iteration.

        Warns:
            UserWarning: this rank leaves the order of the first iteration; once.

        Collectives:
            First iteration: one object gather over the shard group. All ranks must call.
        """
        root, handle = self.root, unit.handle
        if not compat.detailed_debug():
            return
        if not handle.sharded or not unit.module.training or not torch.is_grad_enabled():
            return
        if root.order.first_forward is None:
            names = [f"{unit.name}.{fqn}" if unit.name else fqn for fqn in handle.fqns]
            per_rank = gather_objects(names, handle.groups.shard)
            different = [f"rank {rank} gathers {other}" for rank, other in enumerate(per_rank) if other != per_rank[0]]
            if different:
                raise ExecutionOrderError(
                    f"Forward order differs across ranks: expected one order on all ranks, got rank 0 gathers {per_rank[0]} "
                    f"while {listing(different)}. Make control flow in forward independent of the rank."
                )
            return
        place = len(root.order.running)
        recorded = root.order.first_forward
        if tuple(root.order.running) != recorded[:place] and not self._warned:
            self._warned = True
            seen, first = root.index[unit], recorded[place - 1] if place <= len(recorded) else None
            expected = "nothing more" if first is None else repr(root.units[first].name)
            warnings.warn(
                f"Forward order differs from that of the first iteration on rank {handle.groups.rank}. Collectives are "
                f"unchecked and may give incorrect results or hang: expected {expected} at place {place - 1}, got "
                f"{root.units[seen].name!r}. Keep control flow the same in every iteration.",
                UserWarning,
                stacklevel=4,
            )
