"""Hugging Face Accelerate's FSDP 2 on the CPU, with accelerate 1.15. Run in the folder of this file:

    fsdp-verify run accelerate_fsdp2:IMPLEMENTATION

On a CPU, accelerate 1.15 silently ignores `fsdp_plugin` and prepares DDP; the marked line makes it prepare FSDP, as
on accelerators. Its FSDP 1 cannot run that way: it passes `device_id=cpu:0`, which FSDP 1 does not accept for
parameters on `cpu` (ValueError "Inconsistent compute device and `device_id`").
"""

import os
from weakref import WeakKeyDictionary

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor

from fsdp_testing.adapters.adapter import TorchStyle
from fsdp_testing.adapters.shared import naming, pieces

ACCELERATOR = WeakKeyDictionary()
SHARDS = WeakKeyDictionary()


def wrap(module, setup):
    rank, size = str(setup.rank), str(setup.world_size)
    os.environ.update(RANK=rank, WORLD_SIZE=size, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=size)
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()  # each case its own accelerator
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=setup.strategy == "full_shard",
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[c.__name__ for c in setup.policy.classes] if setup.policy else ["none"],
        cpu_ram_efficient_loading=False,
    )
    if plugin.transformer_cls_names_to_wrap == ["none"]:
        plugin.auto_wrap_policy = None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    AcceleratorState._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)  # the marked line
    model, _ = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.0))
    ACCELERATOR[model], SHARDS[model] = accelerator, dict(naming.named_parameters(model))
    return model


def clip_grad_norm(model, max_norm, norm_type):
    norm = ACCELERATOR[model].clip_grad_norm_(model.parameters(), max_norm, norm_type)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


IMPLEMENTATION = TorchStyle(
    name="accelerate-fsdp2",
    wrap=wrap,
    no_sync=lambda model: ACCELERATOR[model].no_sync(model),
    clip_grad_norm=clip_grad_norm,
    local_pieces=lambda model: pieces.of_parameters(SHARDS[model].items()),
    optimizer_pieces=lambda model, optimizer: pieces.optimizer_state(SHARDS[model], optimizer),
    capabilities=frozenset(
        {
            "full_shard",
            "shard_grad_op",
            "no_sync",
            "accumulate_without_no_sync",
            "forward_only",
            "shared_parameters",
            "reused_modules",
            "frozen_parameters",
            "uneven_parameters",
            "buffers",
            "container_outputs",
            "uneven_batches",
            "clip_grad_norm",
            "optimizer_pieces",
        }
    ),
)
