"""FSDP2: a model with one module under two names cannot load the state that it saved.

Run with torch alone: python fsdp2-load-module-under-two-names.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard


class TwoNames(nn.Module):
    def __init__(self, *, alias: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        if alias:
            self.alias = self.layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def load(*, alias: bool) -> str:
    model = fully_shard(TwoNames(alias=alias))
    options = StateDictOptions(full_state_dict=True)
    try:
        set_model_state_dict(model, get_model_state_dict(model, options=options), options=options)
    except RuntimeError as error:
        return str(error)
    return "loads"


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    one, two = load(alias=False), load(alias=True)
    if rank == 0:
        print(f"one name: {one}\ntwo names: {two}")
    assert one == "loads"
    assert "mixed torch.Tensor and DTensor" in two, "fixed in this torch"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
