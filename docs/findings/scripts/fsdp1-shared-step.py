"""The saved state of a flattened model has one step tensor for all parameters of a unit, so that one process counts twice.

Run with torch alone: python fsdp1-shared-step.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = FSDP(nn.Linear(4, 4), use_orig_params=False, device_id=torch.device("cpu"))
    optimizer = torch.optim.Adam(model.parameters())
    trained(model, optimizer)
    torch.save(FSDP.optim_state_dict(model, optimizer), f"{folder}/{rank}.pt")
    saved = torch.load(f"{folder}/{rank}.pt")
    plain = nn.Linear(4, 4)
    adam = torch.optim.Adam(plain.parameters())
    names = [name for name, _ in plain.named_parameters()]
    state = {index: saved["state"][name] for index, name in enumerate(names)}
    adam.load_state_dict({**adam.state_dict(), "state": state})
    trained(plain, adam)
    steps = [float(adam.state[parameter]["step"]) for parameter in plain.parameters()]
    if rank == 0:
        print(f"steps after one step with FSDP and one without: {steps}, expected [2.0, 2.0]")
    assert steps == [3.0, 3.0], "fixed in this torch"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (folder,), nprocs=2, start_method="fork")
