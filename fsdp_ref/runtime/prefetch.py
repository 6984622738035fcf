"""The gather that is issued ahead of need.

Four cases. (1) ``forward_prefetch``: at a unit's forward, the one that followed it in the first iteration. (2)
``backward_prefetch``: at a unit's backward, the one before it in the latest forward. (3) On CPU nothing runs ahead of
the host by itself, as kernels on a device do; so without being asked the next forward gather is issued early there
too. It is not an "unshard" of its own: only the bytes start earlier. (4) Units that a user names for a unit's forward or
backward, in place of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fsdp_ref.config import BackwardPrefetch
from fsdp_ref.handle.writeback import absorb_params
from fsdp_ref.runtime.unit import Ahead, Unit
from fsdp_ref.states import UnitState

if TYPE_CHECKING:
    from fsdp_ref.runtime.root import Root


def in_forward(root: Root, unit: Unit) -> None:
    """Gather ahead at the forward of ``unit``, whose own parameters are unsharded."""
    explicit = unit.config.forward_prefetch or unit.forward_targets is not None
    if unit.forward_targets is not None:
        targets: Sequence[Unit] = unit.forward_targets
    elif explicit or unit.config.device.type == "cpu":
        # Asked for by the user: the fixed order of the first pass, alike on all ranks. Bytes alone: the latest pass
        # says more.
        place = root.order.next_forward(of_first=explicit)
        targets = () if place is None else (root.units[place],)
    else:
        return
    for following in targets:
        handle = following.handle
        # Gathered, on its way, running, or without bytes. One of another tree has streams and an order of its own.
        under_way = following.life.state is not UnitState.SHARDED or following.ahead is Ahead.PREFETCH
        if handle.empty or under_way or following.root is not root:
            continue
        # What its own forward would do before its gather: nothing may change between this gather and that forward.
        if following.config.full_precision_in_eval:
            handle.set_full_precision(following.full_precision_now)
        absorb_params(handle)
        if explicit:
            following.unshard(Ahead.PREFETCH)
        elif handle.needs_buffer:  # otherwise there are no bytes to send ahead
            following.unshard(Ahead.OVERLAP)


def in_backward(root: Root, unit: Unit, moment: BackwardPrefetch) -> None:
    """Gather ahead at the backward of ``unit``, when its setting asks for this moment."""
    if unit.backward_targets is not None:
        targets = unit.backward_targets if moment is BackwardPrefetch.BACKWARD_PRE else ()
    elif unit.config.backward_prefetch is moment:
        # Of this very forward: each backward walks what was just run, so ranks agree as their forwards did.
        place = root.order.next_backward(root.index[unit])
        targets = () if place is None else (root.units[place],)
    else:
        return
    for following in targets:
        under_way = following.ahead is Ahead.PREFETCH or following.life.state is UnitState.BACKWARD
        # One whose forward made nothing to differentiate has no backward that would use, or free, what comes.
        if following.awaits_backward and not under_way and following.root is root:
            following.unshard(Ahead.PREFETCH)
