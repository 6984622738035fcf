"""When does a unit take over what users changed on its parameters and gradients?"""

from __future__ import annotations

from fsdp_ref.handle.writeback import absorb_params
from fsdp_ref.runtime.unit import Unit


def absorb(unit: Unit) -> None:
    """Take over replaced parameters and gradients."""
    if unit.handle is not None:
        absorb_params(unit.handle)
        unit.handle.grads.absorb()


def settle(unit: Unit) -> None:
    """Give up whatever is left of an earlier forward, taking over what users changed on it."""
    if unit.handle is not None:
        absorb_params(unit.handle)
        unit.drop()


def gather_early(unit: Unit) -> None:
    """Begin to gather because a user asked for it; the next forward uses what comes.

    Collectives:
        An all-gather over the shard group unless parameters are there. All ranks must call.
    """
    absorb(unit)
    if unit.handle is not None:
        unit.handle.streams.gather_after_compute()
    unit.start_gather(prefetch=True)
    unit.mark_early()
