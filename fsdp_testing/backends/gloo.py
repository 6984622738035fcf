"""Gloo: collectives between CPU processes over loopback. Always there where torch was built with it."""

from __future__ import annotations

from fsdp_testing.backends.registry import Backend


def _unavailable(size: int) -> str | None:
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        return "this torch was built without gloo"
    return None


GLOO = Backend(name="gloo", device_type="cpu", unavailable=_unavailable, torch_backend="gloo")
