"""FSDP1: `p.data = ...` while full parameters are summoned is lost without an error."""

from ranks import fsdp1, mlp, off, show, summoned
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def defect(rank):
    model = fsdp1(mlp())
    before, _ = summoned(model)
    with FSDP.summon_full_params(model, writeback=True):
        for parameter in model.parameters():
            parameter.data = parameter.data * 2
    return off("the first weight", summoned(model)[0], before * 2)


show(defect)
