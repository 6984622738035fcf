"""set_optimizer_state_dict(full_state_dict=True) refuses what get_optimizer_state_dict gave, for SGD without momentum.

Run with torch alone: python dsd-stateless-optimizer.py
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


def load(momentum: float) -> str:
    model = fully_shard(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    options = StateDictOptions(full_state_dict=True)
    try:
        set_optimizer_state_dict(
            model, optimizer, get_optimizer_state_dict(model, optimizer, options=options), options=options
        )
    except AssertionError as error:
        return f"AssertionError: {error}"
    return "loads"


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    told = {momentum: load(momentum) for momentum in (0.9, 0.0)}
    if rank == 0:
        print(told)
    assert told[0.9] == "loads"
    assert "Expected device to be set" in told[0.0], "fixed in this torch"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
