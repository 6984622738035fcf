"""FSDP1: CPU offload is refused for a model that computes on the CPU."""

from ranks import data, error_of, fsdp1, mlp, show
from torch.distributed.fsdp import CPUOffload


def defect(rank):
    return error_of(lambda: fsdp1(mlp(), cpu_offload=CPUOffload(offload_params=True))(data(rank)).sum().backward())


show(defect)
