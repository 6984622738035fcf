"""What do the backends that compute on CUDA devices have in common? Device selection, and the reason for having none."""

from __future__ import annotations

from fsdp_testing.backends.registry import RankPlace


def without_devices() -> str | None:
    """Why there is no CUDA device; None when there is one."""
    import torch

    if torch.cuda.is_available():
        return None
    return "this torch is a CPU build" if torch.version.cuda is None else "no CUDA device answers"


def select_device(place: RankPlace) -> None:
    """Make the rank's device the current one, before its process group is made."""
    import torch

    torch.cuda.set_device(place.device_index)


def device_count() -> int:
    """CUDA devices of this machine, asked in the rank."""
    import torch

    return torch.cuda.device_count()
