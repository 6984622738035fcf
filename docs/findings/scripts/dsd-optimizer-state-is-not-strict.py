"""set_optimizer_state_dict loads a state with a parameter that the model does not have.

Run with torch alone: python dsd-optimizer-state-is-not-strict.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

FULL = StateDictOptions(full_state_dict=True, strict=True)


def load(wrap) -> str:
    model = wrap(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    saved = get_optimizer_state_dict(model, optimizer, options=FULL)
    saved["state"]["9.weight"] = saved["state"]["1.weight"]
    saved["param_groups"][0]["params"].append("9.weight")
    try:
        set_optimizer_state_dict(model, optimizer, saved, options=FULL)
    except RuntimeError as refused:
        return f"refused: {refused}"
    return "loaded"


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    told = {wrap.__name__: load(wrap) for wrap in (fully_shard, DistributedDataParallel)}
    if rank == 0:
        print(told)
    assert set(told.values()) == {"loaded"}, "refused in this torch"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
