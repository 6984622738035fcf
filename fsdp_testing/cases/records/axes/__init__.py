"""Every axis of a case: `AXES`, the list that drawing, shrinking, reporting and running use."""

from __future__ import annotations

from fsdp_testing.cases.records.axes.axis import Axis, Option
from fsdp_testing.cases.records.axes.running import Frozen, Numbers, Offload, Optimizer, Strategy, World
from fsdp_testing.cases.records.axes.wrapping import Checkpointed, Ignored, Layouts, Policy, Settings, Units
from fsdp_testing.cases.records.specs import PREFETCH

NUMBERS, STRATEGY, OPTIMIZER = Numbers(), Strategy(), Optimizer()
STARTS = (
    Option("sync_module_states", "sync_module_states", feature="wrap.sync_module_states"),
    Option("meta_init", "meta_init", feature="wrap.meta_init", told=False),  # told by `Setup.init_module`
)
"""What wrapping may be asked to bring; ranks then begin otherwise."""
PLAN = (Units(), Policy(), Ignored(), Layouts(), *STARTS)
AXES: tuple[Axis, ...] = (
    NUMBERS,
    *PLAN,
    Checkpointed(),
    Option("forward_prefetch", "prefetch"),
    Option("backward_prefetch", "prefetch", PREFETCH),
    Settings(),
    World(),
    STRATEGY,
    Offload(),
    OPTIMIZER,
    Frozen(),
)
"""Every axis, in the order in which cases are shrunk."""
