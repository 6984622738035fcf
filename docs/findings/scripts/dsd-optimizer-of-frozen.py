"""set_optimizer_state_dict forgets the state of parameters that were trained and then frozen.

Run with torch alone: python dsd-optimizer-of-frozen.py
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


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = fully_shard(nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def with_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    return [name for name, parameter in model.named_parameters() if optimizer.state.get(parameter)]


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    for options in (FULL, StateDictOptions()):
        model, optimizer = build()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model[0].requires_grad_(False)
        before = with_state(model, optimizer)
        saved = get_optimizer_state_dict(model, optimizer, options=options)
        fresh, loaded = build()
        fresh[0].requires_grad_(False)
        set_optimizer_state_dict(fresh, loaded, saved, options=options)
        after = with_state(fresh, loaded)
        if rank == 0:
            print(f"state of {before}, saved of {sorted(saved['state'])}, loaded of {after}")
        assert before == ["0.weight", "1.weight"]
        assert after == ["1.weight"], "fixed in this torch"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
