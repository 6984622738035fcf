"""FSDP1 with original parameters: a saved `LOCAL_STATE_DICT` cannot be loaded."""

import copy

from ranks import error_of, fsdp1, mlp, show
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType


def defect(rank):
    model = fsdp1(mlp())
    with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        return error_of(lambda: model.load_state_dict(copy.deepcopy(model.state_dict())))


show(defect)
