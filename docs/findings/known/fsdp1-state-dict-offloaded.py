"""FSDP1: a full state dict with `offload_to_cpu=True` frees memory that the parameters on the CPU still use."""

from ranks import data, error_of, fsdp1, mlp, show
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def defect(rank):
    model = fsdp1(mlp(2, 64))
    model(data(rank, width=64)).sum().backward()

    def save():
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True)):
            sum(value.sum().item() for value in model.state_dict().values())

    told = error_of(save)
    assert not told, told
    return ""


show(defect, dies=True)
