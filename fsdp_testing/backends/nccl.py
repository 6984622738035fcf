"""NCCL: collectives between CUDA devices, one rank per device."""

from __future__ import annotations

from fsdp_testing.backends.registry import Backend, RankPlace


def _unavailable(size: int) -> str | None:
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available():
        built = "this torch is a CPU build" if torch.version.cuda is None else "no CUDA device answers"
        return f"{built}; nccl needs one CUDA device per rank"
    if not dist.is_nccl_available():
        return "this torch was built without nccl"
    devices = torch.cuda.device_count()
    if size > devices:
        return f"a world of {size} ranks needs {size} CUDA devices, {devices} found"
    return None


def _prepare(place: RankPlace) -> None:
    import torch

    torch.cuda.set_device(place.device_index)


def _device_count() -> int:
    import torch

    return torch.cuda.device_count()


NCCL = Backend(
    name="nccl",
    device_type="cuda",
    unavailable=_unavailable,
    torch_backend="nccl",
    prepare=_prepare,
    device_count=_device_count,
)
