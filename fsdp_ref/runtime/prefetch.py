"""Which gather is issued ahead of need?

Three cases. (1) ``forward_prefetch``: at a unit's forward, the one that followed it in the first iteration. (2)
``backward_prefetch``: at a unit's backward, the one before it in the latest forward. (3) On CPU nothing runs ahead of
the host by itself, as kernels on a device do; so without being asked the next forward gather is issued early there
too. It is not an "unshard" of its own: only the bytes start earlier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp_ref.config import BackwardPrefetch
from fsdp_ref.handle.writeback import absorb_params
from fsdp_ref.runtime.unit import Ahead, Unit
from fsdp_ref.states import UnitState

if TYPE_CHECKING:
    from fsdp_ref.runtime.root import Root


def in_forward(root: Root, unit: Unit) -> None:
    """Gather ahead at the forward of ``unit``, whose own parameters are there."""
    explicit = unit.config.forward_prefetch
    if not explicit and unit.config.device.type != "cpu":
        return
    target = root.order.next_forward(of_first=explicit)
    if target is None:
        return
    following = root.units[target]
    handle = following.handle
    if handle is None or following.life.state is not UnitState.SHARDED or following.ahead is Ahead.PREFETCH:
        return
    # What its own forward would do before its gather: nothing may change between this gather and that forward.
    if following.config.switches.full_precision_in_eval:
        handle.set_full_precision(following.full_precision_now)
    absorb_params(handle)
    if explicit:
        following.prefetch()
    elif handle.needs_buffer:  # otherwise there are no bytes to send ahead
        following.start_gather(prefetch=True)


def in_backward(root: Root, unit: Unit, moment: BackwardPrefetch) -> None:
    """Gather ahead at the backward of ``unit``, when its setting asks for this moment."""
    if unit.config.backward_prefetch is not moment:
        return
    target = root.order.next_backward(root.index[unit])
    if target is None:
        return
    following = root.units[target]
    asked = following.ahead is Ahead.PREFETCH or following.life.state is UnitState.BACKWARD
    if following.awaits_backward and not asked:
        following.prefetch()
