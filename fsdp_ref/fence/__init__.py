"""Guards that find mistakes of users while units train. Without them the core computes the same numbers silently.

Each kind of mistake is one file. The APIs install all guards; :func:`remove` and :func:`install` are the one switch, for trees
and units made from then on.
"""

from __future__ import annotations

from typing import Final

from fsdp_ref.fence.optimizers import watch_optimizers
from fsdp_ref.fence.order_check import OrderCheck
from fsdp_ref.fence.outside_calls import refuse_outside_gradients, watch_modules
from fsdp_ref.fence.tracked_edits import TrackedEdits
from fsdp_ref.fence.unmanaged import TreeWatch
from fsdp_ref.fence.wire_order import RankComparison
from fsdp_ref.handle.originals import PARAM_GUARDS
from fsdp_ref.runtime.guards import TREE_GUARDS, UNIT_WATCHES

# Before the first forward of a tree is compared with other ranks, it is known to be the tree that was sharded.
_GUARDS: Final = (TreeWatch, RankComparison, OrderCheck, TrackedEdits)
_WATCHES: Final = (watch_modules, watch_optimizers)


def install() -> None:
    """Watch trees and units that are made from now on."""
    TREE_GUARDS[:] = _GUARDS
    UNIT_WATCHES[:] = _WATCHES
    PARAM_GUARDS[:] = [refuse_outside_gradients]


def remove() -> None:
    """Do not watch trees and units that are made from now on."""
    TREE_GUARDS.clear()
    UNIT_WATCHES.clear()
    PARAM_GUARDS.clear()
