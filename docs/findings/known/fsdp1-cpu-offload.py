"""FSDP1: a model that computes on the CPU cannot ask for its parameters to be kept on the CPU."""

from ranks import data, error_of, fsdp1, mlp, show
from torch.distributed.fsdp import CPUOffload


def defect(rank):
    return error_of(lambda: fsdp1(mlp(), cpu_offload=CPUOffload(offload_params=True))(data(rank)).sum().backward())


show(defect)
