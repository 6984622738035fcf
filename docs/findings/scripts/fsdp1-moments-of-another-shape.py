"""FSDP1 loads moments of another shape than their parameter's, and trains on with elements of other rows.

Run with torch alone: python fsdp1-moments-of-another-shape.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def trained(rows: int):
    torch.manual_seed(0)
    model = FSDP(nn.Linear(4, rows, bias=False), use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    larger, its_optimizer = trained(rows=6)
    saved = FSDP.optim_state_dict(larger, its_optimizer)
    model, optimizer = trained(rows=4)
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, saved))
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if rank == 0:
        print(
            "a step with moments of shape",
            tuple(saved["state"]["weight"]["exp_avg"].shape),
            "for a weight of shape (4, 4)",
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
