"""FSDP1: a model on the CPU cannot be wrapped without `device_id` where there is no accelerator."""

from ranks import error_of, mlp, show
from torch.distributed.fsdp import FullyShardedDataParallel


def defect(rank):
    return error_of(FullyShardedDataParallel, mlp())


show(defect)
