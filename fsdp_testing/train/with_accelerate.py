"""A model as it is prepared by Accelerate, as its users do: `Accelerator().prepare(model)`, which on CPUs makes it DDP.

Imported only where `"accelerate"` is asked for: the package may not be installed.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

from fsdp_testing.adapters.adapter import TorchStyle
from fsdp_testing.adapters.protocol import Setup
from fsdp_testing.adapters.shared.claims import REPLICATED


def wrap(module: nn.Module, setup: Setup) -> nn.Module:
    """Prepare the module with an accelerator of its own. Collectives: those of DDP's construction."""
    accelerate: Any = importlib.import_module("accelerate")
    states: Any = importlib.import_module("accelerate.state")
    for state in (states.AcceleratorState, states.GradientState, states.PartialState):
        state._reset_state()  # they are kept for the life of a process, and a rank outlives its model
    unused = accelerate.DistributedDataParallelKwargs(find_unused_parameters=setup.leaves_unused)
    return accelerate.Accelerator(cpu=setup.device.type == "cpu", kwargs_handlers=[unused]).prepare(module)


IMPLEMENTATION = TorchStyle(name="accelerate", wrap=wrap, capabilities=REPLICATED)
