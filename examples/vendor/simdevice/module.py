"""What `torch.sim` is: the functions that code asks of a device's module, as of `torch.cuda`.

Streams and events are torch's own, whose methods end in the guard of the extension. Random numbers are those of the host.
"""

from __future__ import annotations

import types
from typing import Any

import torch

from simdevice import DEVICES, NAME

LATE = {"all": (True, True), "default": (True, False), "others": (False, True), "none": (False, False)}


class Stream(torch.Stream):
    """A stream of a device, by default of the current one."""

    def __new__(cls, device: Any = None, priority: int = 0) -> Stream:
        return super().__new__(cls, device=_device(device), priority=priority)


class Event(torch.Event):
    """An event of the device; flags are those of `torch.cuda.Event`. It is torch's own, which alone takes elapsed times."""

    def __new__(  # type: ignore[misc]
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> torch.Event:
        return torch.Event(device=NAME, enable_timing=enable_timing)


class StreamContext:
    """Work is issued on `stream`, and its device, while it lasts; None changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self._stream = stream
        self._before: list[torch.Stream] = []

    def __enter__(self) -> None:
        if self._stream is not None:
            self._before += [torch.accelerator.current_stream(), torch.accelerator.current_stream(self._stream.device)]
            torch.accelerator.set_stream(self._stream)

    def __exit__(self, *error: object) -> None:
        while self._before:
            torch.accelerator.set_stream(self._before.pop())


class device:  # noqa: N801  # as torch.cuda.device
    """A device is the current one while it lasts."""

    def __init__(self, device: Any) -> None:
        self._index = _device(device).index
        self._before = 0

    def __enter__(self) -> None:
        self._before = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(self._index)

    def __exit__(self, *error: object) -> None:
        torch.accelerator.set_device_index(self._before)


def _device(value: Any) -> torch.device:
    if isinstance(value, int):
        return torch.device(NAME, value)
    made = torch.device(NAME if value is None else value)
    return made if made.index is not None else torch.device(NAME, current_device())


def default_stream(device: Any = None) -> torch.Stream:
    return torch.Stream(stream_id=0, device_index=_device(device).index, device_type=_DEVICE_TYPE)


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(_device(device))


def memory_allocated(device: Any = None) -> int:
    return int(torch.ops.simdevice.live_bytes(_device(device).index, False))


def max_memory_allocated(device: Any = None) -> int:
    return int(torch.ops.simdevice.live_bytes(_device(device).index, True))


def reset_peak_memory_stats(device: Any = None) -> None:
    torch.ops.simdevice.forget_peak(_device(device).index)


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(_device(device))


def set_sync_debug_mode(mode: str) -> None:
    torch.ops.simdevice.make_waits_errors(mode == "error")


def set_late(streams: str) -> None:
    """Say whose work is as late as possible from now on; the rest works at once.

    A missing wait shows where the stream that is not waited for is late and the one that does not wait is not.

    Args:
        streams: `all`, the `default` stream, the `others`, or `none`.

    Raises:
        ValueError: For another word.
    """
    if streams not in LATE:
        raise ValueError(f"SIM_LATE: expected one of {', '.join(LATE)}, got {streams!r}.")
    torch.ops.simdevice.set_late(*LATE[streams])


def set_device(device: Any) -> None:
    torch.accelerator.set_device_index(_device(device).index)


def current_device() -> int:
    return int(torch.accelerator.current_device_index())


def get_rng_state(device: Any = None) -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    torch.set_rng_state(state)


_DEVICE_TYPE = 20  # PrivateUse1, in c10/core/DeviceType.h


def make() -> types.ModuleType:
    """The module to register."""
    module = types.ModuleType(f"torch.{NAME}")
    for value in (
        Stream, Event, StreamContext, device, default_stream, current_stream, memory_allocated, max_memory_allocated,
        reset_peak_memory_stats, synchronize, set_device, set_sync_debug_mode, set_late, current_device,
        get_rng_state, set_rng_state,
    ):  # fmt: skip
        setattr(module, value.__name__, value)
    answers: dict[str, Any] = {
        "stream": StreamContext,
        "set_stream": torch.accelerator.set_stream,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        # Without it torch 2.11 takes the device for unused, and `synchronize` does not wait.
        "_lazy_init": lambda: None,
        "device_count": lambda: DEVICES,
        "_is_in_bad_fork": lambda: False,
        "manual_seed": lambda seed: None,  # torch.manual_seed has set the host's, whose numbers these are
        "manual_seed_all": lambda seed: None,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    }
    vars(module).update(answers)
    return module
