"""FSDP1, use_orig_params=False: the full optimizer state has one step counter; who loads it counts each step many times.

Run with torch alone: python fsdp1-flat-one-step-counter.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    for flat in (False, True):
        model = FullyShardedDataParallel(make(), use_orig_params=not flat, device_id=torch.device("cpu"))
        optimizer = torch.optim.Adam(model.parameters())
        train(model, optimizer)
        saved = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
        if rank == 0:
            torch.save(saved, f"{path}.saved")
            plain = make()
            loaded = torch.optim.Adam(plain.parameters())
            set_optimizer_state_dict(plain, loaded, torch.load(f"{path}.saved"))
            train(plain, loaded)
            steps = [float(state["step"]) for state in loaded.state.values()]
            print(f"use_orig_params={not flat}: one step after the load, the counters are {steps}")
            if flat:
                assert steps == [5.0] * 4, f"fixed in this torch: {steps}"
            else:
                assert steps == [2.0] * 4, steps
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
