"""A vendor's communication library for torch. This one carries everything over gloo; a real one brings its own."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

NAME = "toyccl"
DEVICES = 4
"""Devices of this machine. The toy computes on the CPU and calls each of four places there a device."""

_selected = -1


def select_device(index: int) -> None:
    """Choose the device of this process, as `torch.cuda.set_device` does."""
    global _selected
    _selected = index


def selected_device() -> int:
    """The device of this process; -1 before one is chosen."""
    return _selected


def register() -> None:
    """Make the backend known to torch under its name; every process does this once before it makes a group."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, devices=["cpu"])


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    return dist.ProcessGroupGloo(store, rank, size, timeout)
