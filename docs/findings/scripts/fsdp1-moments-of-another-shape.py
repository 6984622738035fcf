"""FSDP1 loads moments of another shape than their parameter's, and trains on with those of other elements.

Run with torch alone: python fsdp1-moments-of-another-shape.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP


def trained(columns: int):
    torch.manual_seed(0)
    model = FSDP(nn.Linear(columns, 4, bias=False), use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.arange(float(columns)).view(1, -1)).sum().backward()
    optimizer.step()
    return model, optimizer


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    saved = FSDP.optim_state_dict(*trained(columns=6))
    moments = saved["state"]["weight"]["exp_avg"]
    model, optimizer = trained(columns=4)
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, saved))
    (loaded,) = (state["exp_avg"] for state in optimizer.state.values())
    if rank == 1:  # rows 2 and 3
        print(
            "moments of shape",
            tuple(moments.shape),
            "gave rows 2 and 3 of a weight of shape (4, 4)",
            loaded.view(2, 4).tolist(),
        )
    assert torch.equal(loaded, moments.flatten()[8 * rank : 8 * rank + 8]), "refused or put right in this torch"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
