"""What fsdp-testing knows of the simulated device."""

from __future__ import annotations

from fsdp_testing.base.backends import Backend, RankPlace


def unavailable(size: int) -> str | None:
    """The one reason why no rank can run here, or None. Compiles the device if nobody has: ranks find it compiled."""
    import torch
    import torch.distributed as dist

    from simdevice.build import CannotBuild, library

    if not hasattr(torch.utils, "rename_privateuse1_backend") or not hasattr(torch, "accelerator"):
        return (
            f"the simulated device is a PrivateUse1 device with streams, which torch {torch.__version__} does not know"
        )
    if not dist.is_available() or not dist.is_gloo_available():
        return "the simulated device speaks over gloo, and this torch was built without it"
    try:
        library()
    except CannotBuild as error:
        return str(error)
    return None


def prepare(place: RankPlace) -> None:
    """Register the device with torch and choose one: ranks have numbers of their own while there are enough."""
    import torch

    import simdevice

    simdevice.register()
    torch.accelerator.set_device_index(place.device_index)


def device_count() -> int:
    """Devices of a process."""
    from simdevice import DEVICES

    return DEVICES


SIM = Backend(
    name="sim",
    device_type="sim",
    unavailable=unavailable,
    torch_backend="cpu:gloo,sim:sim",
    prepare=prepare,
    device_count=device_count,
)
