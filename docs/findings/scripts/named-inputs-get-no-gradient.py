"""FSDP1 and FSDP2: backward(inputs=parameters) gives sharded parameters no gradient. DDP: it does not average.

FSDP1 with flat parameters gives it. Run with torch alone: python named-inputs-get-no-gradient.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))


def fsdp1(*, flat: bool) -> nn.Module:
    options = {"use_orig_params": not flat, "device_id": torch.device("cpu")}
    inner = model()
    inner[0] = FullyShardedDataParallel(inner[0], **options)
    return FullyShardedDataParallel(inner, **options)


def fsdp2() -> nn.Module:
    mesh, whole = dist.device_mesh.init_device_mesh("cpu", (2,)), model()
    fully_shard(whole[0], mesh=mesh)
    return fully_shard(whole, mesh=mesh)


def first_gradient(wrapped: nn.Module, rank: int, *, named: int | None) -> torch.Tensor | None:
    """This rank's gradient of the first parameter: plainly, or after a backward that names so many of them."""
    loss = wrapped(torch.full((2, 4), rank + 1.0)).sum()
    first = next(p for p in wrapped.parameters() if p.numel())
    loss.backward(**({} if named is None else {"inputs": list(wrapped.parameters())[:named]}))
    gradient = first.grad
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    found = {
        "FSDP1": first_gradient(fsdp1(flat=False), rank, named=9),
        "FSDP1, flat": first_gradient(fsdp1(flat=True), rank, named=9),
        "FSDP2": first_gradient(fsdp2(), rank, named=9),
        "DDP": first_gradient(DistributedDataParallel(model()), rank, named=9),
    }
    if rank == 0:
        print("a backward that names all parameters gives:", {name: grad is not None for name, grad in found.items()})
    expected = {"FSDP1": False, "FSDP1, flat": True, "FSDP2": False, "DDP": True}
    assert {name: grad is not None for name, grad in found.items()} == expected, "otherwise in this torch"
    plain = first_gradient(DistributedDataParallel(model()), rank, named=None)
    one = first_gradient(DistributedDataParallel(model()), rank, named=1)
    apart = (plain - one).abs().max().item()
    if rank == 0:
        print(f"DDP: the gradient of the one parameter that backward names is off by {apart:.2f}")
    assert apart > 0.1, "fixed in this torch: DDP averages what backward names"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
