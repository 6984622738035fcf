"""Optimizer state with NaN, a list or a tensor of a shape of its own beside the moments cannot be saved or loaded.

Run with torch alone: python fsdp1-entries-of-users.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

ENTRIES = {"a number": 7, "NaN": float("nan"), "a list": [0.5, 1.5], "a tensor": torch.ones(1, 2, 2)}


def save_and_load(entry: object, *, use_orig_params: bool) -> str:
    model = FullyShardedDataParallel(
        nn.Sequential(nn.Linear(8, 8)), use_orig_params=use_orig_params, device_id=torch.device("cpu")
    )
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    for entries in optimizer.state.values():
        entries["of the user"] = entry
    try:
        state = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        optimizer.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state))
    except (AssertionError, RuntimeError, TypeError) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return "loaded"


def main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    refused = {}
    for use_orig_params in (True, False):
        says = {name: save_and_load(entry, use_orig_params=use_orig_params) for name, entry in ENTRIES.items()}
        refused[use_orig_params] = {name for name, text in says.items() if text != "loaded"}
        if rank == 0:
            print(
                f"use_orig_params={use_orig_params}",
                *(f"  {name}: {text[:90]}" for name, text in says.items()),
                sep="\n",
            )
    assert refused == {True: {"NaN", "a tensor"}, False: {"a list", "a tensor"}}, "fixed in this torch"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (folder,), nprocs=2, start_method="fork")
