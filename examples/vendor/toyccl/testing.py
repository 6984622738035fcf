"""What fsdp-testing knows of the backend: a name, a device type, and three functions."""

from __future__ import annotations

from fsdp_testing.base.backends import Backend, RankPlace


def unavailable(size: int) -> str | None:
    """The one reason why so many ranks cannot run here, or None."""
    import torch.distributed as dist

    from toyccl import DEVICES

    if not dist.is_gloo_available():
        return "toyccl speaks over gloo, and this torch was built without it"
    return None if size <= DEVICES else f"a world of {size} ranks needs {size} devices, {DEVICES} found"


def prepare(place: RankPlace) -> None:
    """Runs in each rank before its group is made: choose the device, register with torch."""
    import toyccl

    toyccl.select_device(place.device_index)
    toyccl.register()


def device_count() -> int:
    """Devices of this machine, for ranks to share out."""
    from toyccl import DEVICES

    return DEVICES


TOYCCL = Backend(
    name="toyccl",
    device_type="cpu",
    unavailable=unavailable,
    torch_backend="toyccl",
    prepare=prepare,
    device_count=device_count,
)
