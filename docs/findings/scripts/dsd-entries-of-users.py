"""An entry that a user keeps with a parameter is saved and cannot be loaded; one of no parameter is not saved.

Run with torch alone: python dsd-entries-of-users.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

FULL = StateDictOptions(full_state_dict=True)


def fsdp1(module: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(module, use_orig_params=True, device_id=torch.device("cpu"))


def trained(wrap=fully_shard) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = wrap(nn.Linear(8, 8))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return model, optimizer


def main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model, optimizer = trained()
    for entries in optimizer.state.values():
        entries["count"] = 7
    saved = get_optimizer_state_dict(model, optimizer, options=FULL)
    assert saved["state"]["weight"]["count"] == 7
    says = "loaded"
    try:
        set_optimizer_state_dict(*trained(), optim_state_dict=saved, options=FULL)
    except KeyError as error:
        says = f"KeyError: {error}"
    first, second = (trained(fsdp1) for _ in range(2))
    first[1].state["seen"] = 7
    saved = get_optimizer_state_dict(*first, options=FULL)
    set_optimizer_state_dict(*second, optim_state_dict=saved, options=FULL)
    kept = "seen" in saved["state"], "seen" in second[1].state
    own = FullyShardedDataParallel.optim_state_dict_to_load(*second, FullyShardedDataParallel.optim_state_dict(*first))
    if rank == 0:
        print(
            f"{says}\nFSDP1: the entry of no parameter is saved: {kept[0]}, loaded: {kept[1]}, by FSDP: {'seen' in own['state']}"
        )
    assert kept == (True, False), "fixed in this torch"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (folder,), nprocs=2, start_method="fork")
