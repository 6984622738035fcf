"""The reference's `replicate`: whole modules whose gradients are averaged once a backward has ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn

from fsdp_ref.api.replicate import replicate
from fsdp_ref.comm.division import DivideFactors
from fsdp_testing.adapters.adapter import TorchStyle
from fsdp_testing.adapters.protocol import Division, Setup
from fsdp_testing.adapters.shared import replicated
from fsdp_testing.adapters.shared.checkpointing import checkpoint_modules
from fsdp_testing.adapters.shared.claims import REPLICATED
from fsdp_testing.errors import InvalidImplementation

_NAME = "fsdp_ref-replicate"
_SETTINGS = ("mesh_for_group", "small_buckets", "static_graph", "gradient_views")

CAPABILITIES = REPLICATED | {
    "ignored_parameters",
    "several_forwards",
    "backward_twice",
    "second_order",
    "backward_after_no_sync",
    "inner_forward",
    "thawed_parameters",
    "opaque_outputs",
    "forward_methods",
    "reentrant_checkpointing",
    "dtype_cast",
    "exception_recovery",
    "gradient_replacement",
    *_SETTINGS,
}


def wrap(module: nn.Module, setup: Setup) -> nn.Module:
    """Replicate the whole module; it has no units.

    Collectives: none; the first forward broadcasts rank 0's parameters and buffers.
    """
    if setup.strategy != "no_shard":
        raise InvalidImplementation(
            f"{_NAME}: expected strategy 'no_shard', got {setup.strategy!r}. Run only what it claims."
        )
    setup.refuse(_NAME, "precision", "cpu_offload", "init_module", "forward_prefetch", "backward_prefetch")
    setup.refuse_settings(_NAME, *_SETTINGS)
    checkpoint_modules(module, setup.checkpointed, reentrant=setup.checkpoint_reentrant)
    asked: dict[str, Any] = {"broadcast_buffers": False}
    if "mesh_for_group" in setup.settings:
        asked["device_mesh"] = setup.mesh
    elif setup.group is not dist.group.WORLD:
        asked["process_group"] = setup.group
    options = {"small_buckets": ("bucket_cap_mb", 1e-4), "static_graph": ("static_graph", True)}
    options["gradient_views"] = ("gradient_as_bucket_view", True)
    asked |= dict(options[name] for name in options if name in setup.settings)
    return replicate(module, [module.get_submodule(name) for name in setup.ignored], **asked)


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Keep gradients local."""
    with replicate.state(model).replica.no_sync():
        yield


def division(setup: Setup) -> Division:
    """Gradients are divided before and after the sum."""
    factors = DivideFactors.for_world(setup.world_size)
    return Division(before=factors.before, after=factors.after)


IMPLEMENTATION = TorchStyle(
    name=_NAME,
    wrap=wrap,
    capabilities=CAPABILITIES,
    source="torch.distributed._composable.replicate",
    no_sync=no_sync,
    division=division,
    **replicated.METHODS,
)
