"""FSDP2: a full state does not load after a forward that no backward followed, where the root stays unsharded.

Run with torch alone: python fsdp2-full-state-after-a-forward.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard


def roll_back(*, evaluate: bool, reshard: bool = False) -> str:
    model = fully_shard(nn.Linear(4, 4), reshard_after_forward=False)
    options = StateDictOptions(full_state_dict=True)
    saved = get_model_state_dict(model, options=options)
    if evaluate:
        with torch.no_grad():
            model(torch.ones(2, 4))
    if reshard:
        model.reshard()
    try:
        set_model_state_dict(model, saved, options=options)
    except RuntimeError as error:
        return str(error)
    return "loads"


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    saved, evaluated, resharded = (
        roll_back(evaluate=False),
        roll_back(evaluate=True),
        roll_back(evaluate=True, reshard=True),
    )
    if rank == 0:
        print(f"saved: {saved}\nsaved, evaluated: {evaluated}\nsaved, evaluated, resharded: {resharded}")
    assert saved == resharded == "loads"
    assert "Error(s) in loading state_dict" in evaluated, "fixed in this torch"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
