"""FSDP2: backward of modules that are one unit finds freed weights, if the last one's output needs no gradient.

Run with torch alone: python fsdp2-group-ends-without-gradient.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard


class Offset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self) -> torch.Tensor:
        return self.weight.sin()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.offset = nn.Linear(4, 4), Offset()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.offset()


def gradient(*, grouped: bool) -> torch.Tensor:
    torch.manual_seed(0)
    model = Model()
    for unit in [[model.linear, model.offset]] if grouped else [model.linear, model.offset]:
        fully_shard(unit)
    fully_shard(model)
    inputs = torch.randn(2, 4, requires_grad=True)
    model(inputs).sum().backward()
    return inputs.grad


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    assert gradient(grouped=False).abs().max() > 0
    raised = ""
    try:
        gradient(grouped=True)
    except RuntimeError as error:
        raised = str(error)
    if rank == 0:
        print("as one unit:", raised or "right")
    assert "storage of size 0" in raised, "fixed in this torch"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
