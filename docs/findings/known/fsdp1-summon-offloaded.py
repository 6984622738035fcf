"""FSDP1: `summon_full_params(offload_to_cpu=True)` frees memory that the parameters on the CPU still use."""

from ranks import data, error_of, fsdp1, mlp, show
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def defect(rank):
    model = fsdp1(mlp(2, 64))
    model(data(rank, width=64)).sum().backward()

    def summon():
        with FSDP.summon_full_params(model, offload_to_cpu=True, writeback=False):
            sum(parameter.sum().item() for parameter in model.parameters())

    told = error_of(summon)
    assert not told, told
    return ""


show(defect, dies=True)
