"""FSDP1: optimizer state, from one rank for all, does not pass in a process group that rank 0 is not in.

Run with torch alone: python fsdp1-group-without-rank-0.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
)


def attempt(action: object) -> str:
    try:
        action()
    except ValueError as error:
        return str(error).split(" <")[0]
    return "works"


def save_and_load(group: dist.ProcessGroup, use_orig_params: bool) -> list[str]:
    model = FullyShardedDataParallel(
        nn.Linear(3, 2), process_group=group, use_orig_params=use_orig_params, device_id=torch.device("cpu")
    )
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    shapes = {"weight": (2, 3), "bias": (2,)}
    state = {name: {key: torch.ones(shape) for key in ("exp_avg", "exp_avg_sq")} for name, shape in shapes.items()}
    whole = {"state": state, "param_groups": [{**optimizer.param_groups[0], "params": list(shapes)}]}  # of another run

    def save() -> None:
        FullyShardedDataParallel.optim_state_dict(model, optimizer, group=group)

    def load() -> None:
        FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, whole, group=group)

    said = [attempt(save), attempt(load)]
    first_only = (FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True))
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, *first_only):
        return [*said, attempt(load)]


def main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3)
    group = dist.new_group([1, 2])
    found = {flag: save_and_load(group, flag) for flag in (False, True)} if rank else {}
    for flag, said in found.items() if rank == 1 else ():
        print(f"use_orig_params={flag}: saving: {said[0]}; loading: {said[1]}; with rank0_only: {said[2]}")
    if rank:
        refused = "Global rank 0 is not part of group"
        assert found == {False: [refused, "works", refused], True: ["works", "works", refused]}, "fixed in this torch"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (folder,), nprocs=3, start_method="fork")
