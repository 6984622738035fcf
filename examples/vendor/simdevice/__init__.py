"""A simulated accelerator: torch's device `sim`, whose memory is the host's and whose work is late."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

NAME = "sim"
DEVICES = 8  # as in device.cpp


def register() -> None:
    """Make the device, its module `torch.sim` and the process group `sim` known to torch in this process.

    Raises:
        simdevice.build.CannotBuild: Without a compiler.
        ValueError: For a value of `SIM_LATE` that `torch.sim.set_late` does not know.
    """
    import torch
    import torch.distributed as dist

    from simdevice import module
    from simdevice.build import library

    if hasattr(torch, NAME):
        return
    torch.ops.load_library(str(library()))
    module.set_late(os.environ.get("SIM_LATE", "all"))
    torch.ops.simdevice.start()
    torch.utils.rename_privateuse1_backend(NAME)
    made = module.make()
    torch._register_device_module(NAME, made)
    sys.modules[made.__name__] = made
    torch.utils.generate_methods_for_privateuse1_backend()
    dist.Backend.register_backend(NAME, _create, devices=[NAME])


def _create(store: object, rank: int, size: int, timeout: timedelta) -> object:
    """A group needs an object for the device; its collectives are those of the extension, over the group's gloo."""
    import torch.distributed as dist

    return dist.ProcessGroupGloo(store, rank, size, timeout)
