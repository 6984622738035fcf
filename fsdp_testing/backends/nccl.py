"""NCCL: collectives between CUDA devices, one rank per device."""

from __future__ import annotations

from fsdp_testing.backends import cuda
from fsdp_testing.backends.registry import Backend


def _unavailable(size: int) -> str | None:
    import torch.distributed as dist

    missing = cuda.without_devices()
    if missing is not None:
        return f"{missing}; nccl needs one CUDA device per rank"
    if not dist.is_nccl_available():
        return "this torch was built without nccl"
    devices = cuda.device_count()
    if size > devices:
        return f"a world of {size} ranks needs {size} CUDA devices, {devices} found"
    return None


NCCL = Backend(
    name="nccl",
    device_type="cuda",
    unavailable=_unavailable,
    torch_backend="nccl",
    prepare=cuda.select_device,
    device_count=cuda.device_count,
)
