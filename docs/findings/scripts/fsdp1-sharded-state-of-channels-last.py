"""FSDP1: saving the sharded state of a channels-last weight raises.

Run with torch alone: python fsdp1-sharded-state-of-channels-last.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType


def saves(memory_format: torch.memory_format) -> bool:
    conv = nn.Conv2d(2, 3, 2).to(memory_format=memory_format)
    model = FullyShardedDataParallel(conv, use_orig_params=True, device_id=torch.device("cpu"))
    model(torch.ones(1, 2, 3, 3)).sum().backward()
    try:
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            model.state_dict()
    except ValueError as error:
        print(error)
        return False
    return True


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    assert saves(torch.contiguous_format)
    assert not saves(torch.channels_last), "fixed in this torch"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
