"""FSDP1: the state of an optimizer over some of the parameters cannot be saved and loaded."""

import torch
from ranks import data, error_of, fsdp1, mlp, show
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType


def defect(rank):
    model = fsdp1(mlp())
    optimizer = torch.optim.Adam(list(model.parameters())[:2], 0.1)
    model(data(rank)).sum().backward()
    optimizer.step()

    def round_trip():
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state = FSDP.optim_state_dict(model, optimizer)
            optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state))

    return error_of(round_trip)


show(defect)
