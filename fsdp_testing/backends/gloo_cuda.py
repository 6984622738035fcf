"""Gloo between CUDA devices: every collective passes through the host, and ranks may share a device.

NCCL refuses two ranks on one device. This backend runs any number of ranks on any number of devices, slowly: it is
how a machine with one GPU proves the CUDA path of an implementation (streams, events, memory) on several ranks.
"""

from __future__ import annotations

from fsdp_testing.backends import cuda
from fsdp_testing.backends.registry import Backend


def _unavailable(size: int) -> str | None:
    import torch.distributed as dist

    missing = cuda.without_devices()
    if missing is not None:
        return f"{missing}; gloo-cuda needs one CUDA device, which its ranks may share"
    return None if dist.is_gloo_available() else "this torch was built without gloo"


GLOO_CUDA = Backend(
    name="gloo-cuda",
    device_type="cuda",
    unavailable=_unavailable,
    torch_backend="gloo",
    prepare=cuda.select_device,
    device_count=cuda.device_count,
)
