"""torch's DistributedDataParallel, judged as "every rank has everything".

Claims follow the class documentation and the DDP note. `find_unused_parameters` is on, since parts that no rank or
not every rank uses are claimed; synchronising buffers in forward is off, since with it the buffers of all ranks but
the first are overwritten instead of computed. Thawing after construction is excluded by the documentation and not
claimed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from fsdp_testing.adapters.adapter import TorchStyle
from fsdp_testing.adapters.protocol import Division, Precision, Setup
from fsdp_testing.adapters.shared import replicated
from fsdp_testing.adapters.shared.checkpointing import checkpoint_modules
from fsdp_testing.adapters.shared.claims import REPLICATED
from fsdp_testing.errors import InvalidImplementation

_ARGUMENTS = frozenset(inspect.signature(DistributedDataParallel.__init__).parameters)
#: torch 2.13 renamed the option; the old name warns there. With the old one buffers are not broadcast on construction.
_RENAMED = "forward_sync_buffers" in _ARGUMENTS
_NO_BUFFER_SYNC: dict[str, Any] = {"forward_sync_buffers" if _RENAMED else "broadcast_buffers": False}

_SETTINGS: dict[str, dict[str, Any]] = {
    "static_graph": {"static_graph": True},
    "gradient_views": {"gradient_as_bucket_view": True},
    "small_buckets": {"bucket_cap_mb": 1e-4},
    "batched_copies": {"batched_grad_copy": True},
    "unused_left_out": {"skip_all_reduce_unused_params": True},
}
"""The argument for each setting of a case; those that this torch lacks are not claimed."""
_SETTINGS = {name: asked for name, asked in _SETTINGS.items() if _ARGUMENTS.issuperset(asked)}

_HOOKS: dict[torch.dtype, Callable[..., Any]] = {
    torch.bfloat16: default_hooks.bf16_compress_hook,
    torch.float16: default_hooks.fp16_compress_hook,
}

CAPABILITIES = (
    REPLICATED
    | {
        "ignored_parameters",
        "second_order",
        "deep_copies",
        "unit_alone",
        "forward_methods",
        "mesh_for_group",
        "compressing_hook",
        *_SETTINGS,
    }
    | ({"sync_module_states"} if _RENAMED else set())
)


def wrap(module: nn.Module, setup: Setup) -> nn.Module:
    """DDP around the whole module; it ignores units and policies.

    Collectives: DDP compares parameter shapes and, on construction, broadcasts rank 0's parameters and buffers.
    """
    if setup.strategy != "no_shard":
        raise InvalidImplementation(
            f"torch-ddp: expected strategy 'no_shard', got {setup.strategy!r}. Run only what it claims."
        )
    if setup.compressed_to is None or setup.precision != Precision(reduce_dtype=setup.compressed_to):
        setup.refuse("torch-ddp", "precision")
    setup.refuse("torch-ddp", "cpu_offload", "init_module", "forward_prefetch", "backward_prefetch")
    setup.refuse_settings("torch-ddp", "mesh_for_group", "compressing_hook", *_SETTINGS)
    checkpoint_modules(module, setup.checkpointed, reentrant=setup.checkpoint_reentrant)
    inside = tuple(f"{name}." for name in setup.ignored)
    ignored = [fqn for fqn, _ in module.named_parameters(remove_duplicate=False) if fqn.startswith(inside)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
    asked: dict[str, Any] = dict(_NO_BUFFER_SYNC) if next(module.buffers(), None) is not None else {}
    if "mesh_for_group" in setup.settings:
        asked["device_mesh"] = setup.mesh
    elif setup.group is not dist.group.WORLD:
        asked["process_group"] = setup.group
    if setup.leaves_unused:
        asked["find_unused_parameters"] = True
    for name in sorted(setup.settings):
        asked |= _SETTINGS.get(name, {})
    model = DistributedDataParallel(module, **asked)
    if setup.compressed_to is not None:
        model.register_comm_hook(setup.group, _HOOKS[setup.compressed_to])
    return model


def division(setup: Setup) -> Division:
    """Each rank's gradient is multiplied by the reciprocal of the world size before the sum (torch's reducer); hooks divide."""
    return Division(before=setup.world_size, after=1, by_reciprocal=setup.compressed_to is None)


IMPLEMENTATION = TorchStyle(
    name="torch-ddp",
    wrap=wrap,
    capabilities=CAPABILITIES,
    source="https://pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html",
    division=division,
    **replicated.METHODS,
)
