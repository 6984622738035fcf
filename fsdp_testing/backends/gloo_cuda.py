"""Gloo between CUDA devices: every collective passes through the host, and ranks may share a device.

NCCL refuses two ranks on one device. This backend runs any number of ranks on any number of devices, slowly: it is
how a machine with one GPU proves the CUDA path of an implementation (streams, events, memory) on several ranks.
"""

from __future__ import annotations

from fsdp_testing.backends.registry import Backend, RankPlace


def _unavailable(size: int) -> str | None:
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available():
        built = "this torch is a CPU build" if torch.version.cuda is None else "no CUDA device answers"
        return f"{built}; gloo-cuda needs one CUDA device, which its ranks may share"
    return None if dist.is_gloo_available() else "this torch was built without gloo"


def _prepare(place: RankPlace) -> None:
    import torch

    torch.cuda.set_device(place.device_index)


def _device_count() -> int:
    import torch

    return torch.cuda.device_count()


GLOO_CUDA = Backend(
    name="gloo-cuda",
    device_type="cuda",
    unavailable=_unavailable,
    torch_backend="gloo",
    prepare=_prepare,
    device_count=_device_count,
)
