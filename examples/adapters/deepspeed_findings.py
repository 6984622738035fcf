"""Defects of DeepSpeed's ZeRO that the checks found, with deepspeed alone: python deepspeed_findings.py

Each assertion holds on deepspeed 0.19.8 (CPU, gloo, 2 ranks) and fails on a version without the defect.
"""

import os
import tempfile

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from deepspeed.utils import safe_set_full_fp32_param
from torch import nn

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # saves compiling it


class Branches(nn.Module):
    """Two layers, one of which an iteration may leave out."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes = nn.Linear(5, 7), nn.Linear(5, 7)

    def forward(self, x, both):
        return self.always(x) + (self.sometimes(x) if both else 0)


def engine(stage, *, managed=True):
    torch.manual_seed(0)
    model = Branches()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": managed,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[:2]


def whole(parameter):
    with deepspeed.zero.GatheredParameters([parameter] if hasattr(parameter, "ds_id") else []):
        return parameter.detach().clone()


def moved_while_unused(stage):
    """By how much plain SGD moves a weight in an iteration that does not use it."""
    made, _ = engine(stage)
    made.backward(made(torch.ones(3, 5), True).pow(2).sum())
    made.step()
    before = whole(made.module.sometimes.weight)
    made.backward(made(torch.ones(3, 5), False).pow(2).sum())
    made.step()
    return float((whole(made.module.sometimes.weight) - before).abs().max())


def trace_of_cleared(stage, clear, *, managed):
    """By how much a gradient that was cleared before the next backward changes the step."""
    after = []
    for first in (False, True):
        made, optimizer = engine(stage, managed=managed)
        if first:
            made.backward(made(torch.ones(3, 5), True).pow(2).sum())
            clear(made, optimizer)
        made.backward(made(-torch.ones(3, 5), True).pow(2).sum())
        made.step()
        after.append(whole(made.module.always.weight))
    return float((after[0] - after[1]).abs().max())


def setting_an_uneven_parameter():
    """What safe_set_full_fp32_param does to 35 elements on 2 ranks."""
    made, _ = engine(3)
    weight = made.module.always.weight
    try:
        safe_set_full_fp32_param(weight, torch.zeros(7, 5))
    except RuntimeError as error:
        return str(error)
    return ""


def main(rank, path):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    unused = {stage: moved_while_unused(stage) for stage in (1, 2, 3)}
    cleared = {
        "stage 2, optimizer.zero_grad": trace_of_cleared(2, lambda e, o: o.zero_grad(), managed=False),
        "stage 3, engine.zero_grad": trace_of_cleared(3, lambda e, o: e.zero_grad(), managed=True),
        "stage 3, optimizer.zero_grad": trace_of_cleared(3, lambda e, o: o.zero_grad(), managed=True),
    }
    refused = setting_an_uneven_parameter()
    print(f"rank {rank}: unused moved by {unused}; cleared left {cleared}; setting: {refused or 'worked'}")
    assert unused[1] == unused[2] == 0.0
    assert unused[3] > 0.1
    assert cleared["stage 2, optimizer.zero_grad"] > 0.1
    assert cleared["stage 3, engine.zero_grad"] > 0.1
    assert cleared["stage 3, optimizer.zero_grad"] < 1e-5
    assert ("exceeds dimension size" in refused) == (rank == 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="spawn")
