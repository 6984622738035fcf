"""FSDP1: a gradient that is replaced inside `summon_full_params(with_grads=True)` is dropped.

Run with torch alone: python fsdp1-replaced-gradients.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def step(*, replaces: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = FSDP(nn.Linear(4, 4), device_id=torch.device("cpu"), use_orig_params=True)
    model(torch.randn(2, 4)).sum().backward()
    with FSDP.summon_full_params(model, with_grads=True):
        for parameter in model.parameters():
            if replaces:
                parameter.grad = torch.zeros_like(parameter.grad)
            else:
                parameter.grad.zero_()
    with FSDP.summon_full_params(model, with_grads=True, writeback=False):
        return [parameter.grad.clone() for parameter in model.parameters()]


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    in_place, replaced = step(replaces=False), step(replaces=True)
    largest = [float(gradient.abs().max()) for gradient in replaced]
    if rank == 0:
        print("gradients that were replaced by zeros are up to", largest)
    assert not any(gradient.any() for gradient in in_place)
    assert min(largest) > 0.1, "fixed in this torch"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
