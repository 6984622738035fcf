"""A simulated accelerator: torch's device `sim`, whose memory is the host's and whose work is late."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

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
    atexit.register(_end_backward_threads)


def _end_backward_threads() -> None:
    """Let the threads of backward end before the interpreter does.

    Each device has such a thread, which drops a backward's Python objects after the backward has returned. If it asks for
    Python's lock while the interpreter ends, CPython unwinds it through a destructor, and the process aborts: "terminate
    called without an active exception". `Engine::stop` returns before the threads have asked for that lock a last time.
    """
    import torch

    if not _backward_threads():  # no backward yet, or a forked process, which has none and would wait for its parent's
        return
    torch.ops.simdevice.end_backward_threads()
    deadline = time.monotonic() + 10
    while _backward_threads() and time.monotonic() < deadline:
        time.sleep(0.001)


def _backward_threads() -> int:
    names = []
    for name in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it ends meanwhile
            names.append(name.read_text())
    return sum(name.startswith("pt_autograd_") for name in names)


def _create(store: object, rank: int, size: int, timeout: timedelta) -> object:
    """A group needs an object for the device; its collectives are those of the extension, over the group's gloo."""
    import torch.distributed as dist

    return dist.ProcessGroupGloo(store, rank, size, timeout)
