"""set_model_state_dict(broadcast_from_rank0=True) refuses an unfitting state on some ranks alone.

Run with torch alone: python dsd-rank-0-state-unfit.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard

OPTIONS = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def load(rank: int, **changes) -> str:
    model = nn.Linear(3, 4)
    state = dict(model.state_dict()) | changes
    fully_shard(model)
    try:
        set_model_state_dict(model, state if rank == 0 else {}, options=OPTIONS)
    except RuntimeError as error:
        return str(error)
    return "loaded"


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    told = load(rank, another=torch.ones(2))
    print(f"rank {rank}, unknown name: {told!r}")
    assert (told == "loaded") == (rank == 1), "fixed in this torch"
    told = load(rank, weight=torch.ones(5, 3))
    print(f"rank {rank}, another shape: {told[:70]!r}")
    # Rank 0's shard would have one row more. Rank 1 waits until rank 0's process has ended.
    assert ("must match the size" in told) == (rank == 0), "fixed in this torch"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
