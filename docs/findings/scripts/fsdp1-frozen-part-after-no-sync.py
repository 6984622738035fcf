"""FSDP1: after no_sync a frozen parameter has a gradient.

Run with torch alone: python fsdp1-frozen-part-after-no-sync.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.aside = nn.Linear(3, 3, bias=False)  # trainable, and not in the loss
        self.frozen = nn.Linear(3, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.aside(x)
        return self.frozen(x)


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = FullyShardedDataParallel(Model(), use_orig_params=True, device_id=torch.device("cpu"))
    dict(model.named_parameters())["_fsdp_wrapped_module.frozen.weight"].requires_grad_(False)
    x = torch.full((2, 3), float(rank + 1))
    with model.no_sync():
        model(x).sum().backward()
    frozen = dict(model.named_parameters())["_fsdp_wrapped_module.frozen.weight"]
    assert not frozen.requires_grad
    if rank == 0:
        print(f"the frozen weight has the gradient {frozen.grad}")
    assert frozen.grad is not None, "fixed in this torch: it has none"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
