"""An entry that a user keeps in an optimizer's state is saved, and cannot be loaded into a new optimizer.

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
from torch.distributed.fsdp import fully_shard

FULL = StateDictOptions(full_state_dict=True)


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = fully_shard(nn.Linear(8, 8))
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
    if rank == 0:
        print(says)
    assert says == "KeyError: 'state.weight.count'", "fixed in this torch"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (folder,), nprocs=2, start_method="fork")
