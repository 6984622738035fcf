"""FSDP2: a root whose output is an object of the user's own class leaves the optimizer without gradients, silently.

FSDP1 raises in the same place. Neither documents which outputs it looks into. Run with torch alone:
python outputs-in-objects.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard


class Output:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Output:
        return Output(self.linear(x))


def fsdp1(module: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(module, use_orig_params=True, device_id=torch.device("cpu"))


def fsdp2(module: nn.Module) -> nn.Module:
    return fully_shard(module, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)), reshard_after_forward=False)


def backward(wrap) -> str:
    model = wrap(Wrapped())
    parameters = list(model.parameters())  # what an optimizer holds
    try:
        model(torch.randn(2, 4)).value.sum().backward()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {str(error)[:60]}"
    return f"gradients present: {[p.grad is not None for p in parameters]}"


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    told = {"FSDP1": backward(fsdp1), "FSDP2": backward(fsdp2)}
    if rank == 0:
        print(told)
    assert "expected to be in states" in told["FSDP1"], "fixed in this torch"
    assert told["FSDP2"] == "gradients present: [False, False]", "fixed in this torch"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
