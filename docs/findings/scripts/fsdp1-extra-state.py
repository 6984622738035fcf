"""A whole state cannot be saved if a module inside has `get_extra_state`.

Run with torch alone: python fsdp1-extra-state.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


class Scaled(nn.Linear):
    def get_extra_state(self):
        return {"factor": 2.0}

    def set_extra_state(self, state):
        pass


def main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = FSDP(nn.Sequential(FSDP(Scaled(4, 4), device_id=torch.device("cpu"))), device_id=torch.device("cpu"))
    says = {}
    ways = {
        "get_model_state_dict": lambda: get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)),
        "state_dict": model.state_dict,
    }
    for name, save in ways.items():
        try:
            says[name] = sorted(save())
        except AttributeError as error:
            says[name] = f"AttributeError: {error}"
    if rank == 0:
        for name, said in says.items():
            print(name, said)
    assert isinstance(says["get_model_state_dict"], str), "fixed in this torch"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (folder,), nprocs=2, start_method="fork")
