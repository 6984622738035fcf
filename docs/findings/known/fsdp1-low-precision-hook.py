"""FSDP1: torch's own low-precision communication hooks raise on the CPU."""

from ranks import data, error_of, fsdp1, mlp, show
from torch.distributed.algorithms._comm_hooks import LOW_PRECISION_HOOKS
from torch.distributed.algorithms._comm_hooks.default_hooks import LowPrecisionState
from torch.distributed.distributed_c10d import _get_default_group


def defect(rank):
    model = fsdp1(mlp())
    model.register_comm_hook(LowPrecisionState(_get_default_group()), LOW_PRECISION_HOOKS[-1])
    return error_of(model(data(rank)).sum().backward)


show(defect)
