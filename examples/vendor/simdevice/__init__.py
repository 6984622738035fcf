"""A simulated accelerator: torch's device `sim`, whose memory is the host's and whose work is late."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

NAME = "sim"
DEVICES = 8  # as in device.cpp
LATE = {"all": (True, True), "default": (True, False), "others": (False, True)}
"""Whose work is as late as possible, by the value of `SIM_LATE`: every stream's, or that of the default stream or of the
others alone, while the rest works at once. A missing wait shows where the stream that is not waited for is late."""


def register() -> None:
    """Make the device, its module `torch.sim` and the process group `sim` known to torch in this process.

    Raises:
        simdevice.build.CannotBuild: Without a compiler.
        ValueError: For another value of `SIM_LATE` than `all`, `default` and `others`.
    """
    import torch
    import torch.distributed as dist

    from simdevice import module
    from simdevice.build import library

    late = os.environ.get("SIM_LATE", "all")
    if late not in LATE:
        raise ValueError(f"SIM_LATE: expected one of {', '.join(LATE)}, got {late!r}.")
    if hasattr(torch, NAME):
        return
    torch.ops.load_library(str(library()))
    torch.ops.simdevice.start(*LATE[late])
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
