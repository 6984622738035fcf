"""What can users do to a unit between passes: change its parameters and gradients, and have it gathered early?"""

from __future__ import annotations

from fsdp_ref.handle.writeback import absorb_params
from fsdp_ref.runtime.unit import Unit


def absorb(unit: Unit) -> None:
    """Take over replaced parameters and gradients."""
    if unit.handle is not None:
        absorb_params(unit.handle)
        unit.handle.grads.absorb()


def gather_early(unit: Unit) -> None:
    """Begin to gather because a user asked for it; the next forward uses what comes.

    Collectives:
        An all-gather over the shard group unless parameters are there. All ranks must call.
    """
    absorb(unit)
    if unit.handle is not None:
        # The optimizer's step, or a user's edit, may still write to the shard on the current stream.
        unit.handle.streams.gather_after_compute()
    unit.ask_early()
