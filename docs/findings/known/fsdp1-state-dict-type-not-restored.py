"""FSDP1: after an exception inside `state_dict_type` the model keeps that type of state dict."""

from ranks import error_of, fsdp1, mlp, show
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType


def defect(rank):
    model = fsdp1(mlp())
    before = FSDP.get_state_dict_type(model).state_dict_type

    def body():
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            raise KeyError("the user's")

    error_of(body)
    after = FSDP.get_state_dict_type(model).state_dict_type
    return "" if after is before else f"before it was {before}, after it is {after}"


show(defect)
