"""FSDP1: the full optimizer state has `exp_avg_sq` where `exp_avg` belongs."""

import torch
from ranks import data, fsdp1, mlp, off, show
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def defect(rank):
    model = fsdp1(mlp())
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    model(data(0)).sum().backward()
    optimizer.step()
    default = FSDP.optim_state_dict(model, optimizer)["state"]["0.weight"]["exp_avg"]
    safe = (FullStateDictConfig(offload_to_cpu=False), FullOptimStateDictConfig(offload_to_cpu=False))
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *safe):
        wanted = FSDP.optim_state_dict(model, optimizer)["state"]["0.weight"]["exp_avg"]
    return off("exp_avg of 0.weight in the default full state", default, wanted)


show(defect)
