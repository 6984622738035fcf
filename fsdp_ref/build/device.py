"""The device that a unit computes on."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from fsdp_ref.errors import FsdpRuntimeError, FsdpValueError, listing

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

CPU = torch.device("cpu")
_COUNTING = ("is_available", "device_count", "current_device")


def explicit_device(device_id: object) -> torch.device | None:
    """Return the device that a user's ``device_id`` names, with its index; None for None.

    Args:
        device_id: An index of an accelerator, a string such as "cuda:1", or a ``torch.device``.

    Raises:
        FsdpRuntimeError: It names an accelerator that this process does not have.
        FsdpValueError: It is none of these, or names a device that holds no values.

    Warns:
        UserWarning: An accelerator without an index: the current one is taken.
    """
    if device_id is None:
        return None
    try:
        device = torch.device(device_id) if isinstance(device_id, str) else device_id
    except RuntimeError:
        device = None
    if isinstance(device, int):
        _refuse_missing(device_id, _accelerator(), device)
        return torch.device(_accelerator(), device)
    if not isinstance(device, torch.device) or device.type == "meta":
        raise FsdpValueError(
            f"device_id: expected an int, a string or a torch.device that holds values, got {device_id!r}. "
            "Pass one of these."
        )
    if device.type == "cpu":
        return CPU  # tensors on the CPU have no index
    if not all(hasattr(getattr(torch, device.type, None), name) for name in _COUNTING):
        return device  # the registered backend counts no devices: leave errors to it
    _refuse_missing(device_id, device.type, device.index)
    if device.index is not None:
        return device
    warnings.warn(
        f"FSDP got the argument `device_id` {device_id}, which does not have an explicit index. FSDP will use the "
        "current device. Pass the index to be sure.",
        UserWarning,
        stacklevel=5,
    )
    return torch.device(device.type, torch.get_device_module(device).current_device())


def _accelerator() -> str:
    """Return the type of this process's accelerator, to which device numbers refer."""
    current = torch.accelerator.current_accelerator()
    return "cuda" if current is None else current.type


def _refuse_missing(device_id: object, device_type: str, index: int | None) -> None:
    module: Any = getattr(torch, device_type)
    count = module.device_count() if module.is_available() else 0
    if not count:
        raise FsdpRuntimeError(
            f"device_id={device_id!r}: expected an accelerator, which an integer or {device_type!r} names, got none on this "
            "host. Pass torch.device('cpu')."
        )
    if index is not None and not 0 <= index < count:
        raise FsdpRuntimeError(
            f"device_id={device_id!r}: expected one of the {count} accelerators that this process has, got index {index}. "
            f"Pass 0 to {count - 1}."
        )


def compute_device(
    asked: torch.device | None, params: Iterable[Tensor], *, needs_cuda: bool, offload: bool = False
) -> torch.device:
    """Return the device that a unit computes on.

    Args:
        asked: The user's choice.
        params: The unit's parameters; those on the meta device do not count.
        needs_cuda: The group communicates tensors on CUDA only.
        offload: Parameters live on the CPU outside computation, so their device does not decide.

    Returns:
        ``asked``; without it the accelerator where the parameters are; else the CPU, or the current CUDA device for a
        group that needs it.

    Raises:
        FsdpRuntimeError: Parameters on several devices, or on the CPU where the group cannot communicate them.
        FsdpValueError: Parameters on another accelerator than ``asked``.
    """
    found = sorted({param.device for param in params if not param.is_meta}, key=str)
    accelerators = [device for device in found if device.type != "cpu"]
    if len(accelerators) > 1:
        raise FsdpRuntimeError(
            f"FSDP only supports single device modules: expected one device, got {listing(found)}. Move the module first."
        )
    if asked is not None:
        if accelerators and accelerators[0] != asked:
            raise FsdpValueError(
                f"Inconsistent compute device and `device_id`: expected parameters on {asked} or the CPU, got "
                f"{accelerators[0]} and device_id={asked}. Move the module or change device_id."
            )
        return asked
    if accelerators:
        if len(found) > 1:
            raise FsdpRuntimeError(
                f"The module has CPU and accelerator parameters ({listing(found)}): expected one device. "
                "To move it, please pass in device_id."
            )
        return accelerators[0]
    if not needs_cuda:
        return CPU
    if found and not offload:
        raise FsdpRuntimeError(
            "The passed-in module is on the CPU: expected parameters on CUDA, the only device on which the process group "
            "communicates, got cpu. Pass device_id, or move the module before sharding it."
        )
    return torch.device("cuda", torch.cuda.current_device())
