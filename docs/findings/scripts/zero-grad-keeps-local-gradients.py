"""FSDP2 and FSDP1: zero_grad() between local micro-batches leaves a part of the accumulated gradient behind.

FSDP2 keeps what set_requires_gradient_sync(False) collected, FSDP1 what was reduced before no_sync.
Run with torch alone: python zero-grad-keeps-local-gradients.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard


def gradient(implementation: str, batches: list[tuple[float, str]]) -> torch.Tensor:
    """The gradient after micro-batches (input, 'local', 'cleared' or 'reduced'), cleared once where it says so."""
    torch.manual_seed(0)
    model = nn.Linear(2, 2, bias=False)
    if implementation == "FSDP2":
        model = fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
    else:
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for value, kind in batches:
        x = torch.full((1, 2), value)
        if kind == "reduced":
            model(x).sum().backward()
            continue
        if implementation == "FSDP2":
            model.set_requires_gradient_sync(False)
            model(x).sum().backward()
            model.set_requires_gradient_sync(True)
        else:
            with model.no_sync():
                model(x).sum().backward()
        optimizer.zero_grad()
    parts = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return torch.cat([(part.to_local() if implementation == "FSDP2" else part).reshape(-1) for part in parts])


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    local_first = [(1.0, "local"), (10.0, "reduced")]
    for name, batches in (("FSDP2", local_first), ("FSDP1", [(100.0, "reduced"), *local_first])):
        right, wrong = gradient(name, [(10.0, "reduced")]), gradient(name, batches)
        if rank == 0:
            print(
                f"{name}: after zero_grad the last micro-batch gives {wrong.tolist()}, alone it gives {right.tolist()}"
            )
        assert not torch.equal(right, wrong), f"fixed in this torch: {name}"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
