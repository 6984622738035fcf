"""`get_model_state_dict` of FSDP1 inside `checkpoint_wrapper` has parameters twice, and nothing can load it.

    python dsd-checkpoint-around-fsdp1.py

It asserts that the defect is there.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel

RANKS = 2


def made() -> nn.Module:
    """Return a model one unit of which is recomputed as a whole."""
    inner = FullyShardedDataParallel(nn.Linear(4, 4), use_orig_params=True, device_id=torch.device("cpu"))
    whole = nn.Sequential(checkpoint_wrapper(inner), nn.Linear(4, 4))
    return FullyShardedDataParallel(whole, use_orig_params=True, device_id=torch.device("cpu"))


def save_and_load(rank: int, path: str) -> None:
    """Save the whole state, and load it into a fresh model."""
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=RANKS)
    whole = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(made(), options=whole)
    print(f"rank {rank}: saved {sorted(state)}", flush=True)
    refused = ""
    try:
        set_model_state_dict(made(), state, options=whole)
    except RuntimeError as error:
        refused = str(error)
    print(f"rank {rank}: {refused}", flush=True)
    assert "Missing key(s)" in refused, "fixed in this torch"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(save_and_load, (f"{folder}/store",), nprocs=RANKS)
