"""Tensor parallelism loses terms of second derivatives, and forbids in-place edits of a view of an output.

Run with torch alone: python tensor-parallel-second-order.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def penalised(model: nn.Module) -> torch.Tensor:
    torch.manual_seed(1)
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    loss = model(x).square().sum()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + slope.square().sum()).backward()
    gradient = model[0].weight.grad
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    model = make()
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    off = float((penalised(model) - penalised(make())).abs().max())
    print(f"rank {rank}: the gradient of a penalty is off by {off:.3f}")
    assert off > 0.1, "fixed in this torch"
    try:
        model(torch.ones(5, 4, dtype=torch.float64))[:, :2].mul_(2)
    except RuntimeError as error:
        print(f"rank {rank}: {str(error)[:65]}")
    else:
        raise AssertionError("fixed in this torch")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
