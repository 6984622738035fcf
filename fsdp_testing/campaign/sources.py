"""Which source files make up an implementation, so that a campaign can see which ways through them are new?"""

from __future__ import annotations

from fsdp_testing.implementations.adapter import Adapter

_KNOWN = {
    "torch-ddp": ("torch/nn/parallel/",),
    "torch-fsdp1": ("torch/distributed/fsdp/",),
    "torch-fsdp1-flat": ("torch/distributed/fsdp/",),
    "torch-fsdp2": ("torch/distributed/fsdp/_fully_shard/",),
}


def sources_of(adapter: Adapter) -> tuple[str, ...]:
    """Returns parts of the file names that belong to the implementation; empty if it is not known to be Python."""
    known = _KNOWN.get(adapter.name)
    if known is not None:
        return known
    if adapter.name.startswith("fsdp_ref"):
        return ("fsdp_ref/",)
    module = getattr(adapter.wrap, "__module__", "") or ""
    return (module.partition(".")[0] + "/",) if module and not module.startswith("fsdp_testing.") else ()
