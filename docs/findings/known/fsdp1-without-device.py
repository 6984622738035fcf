"""FSDP1: without an accelerator, a model on the CPU cannot be wrapped without `device_id`."""

from ranks import error_of, mlp, show
from torch.distributed.fsdp import FullyShardedDataParallel


def defect(rank):
    return error_of(FullyShardedDataParallel, mlp())


show(defect)
