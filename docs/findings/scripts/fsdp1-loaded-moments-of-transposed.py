"""FSDP1: optimizer state that is loaded for a transposed weight has its elements in the wrong places.

Run with torch alone: python fsdp1-loaded-moments-of-transposed.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

X = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 7.0]])


def make(*, transposed: bool) -> tuple[FSDP, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 3, bias=False)
    if transposed:
        model.weight = nn.Parameter(model.weight.detach().t().contiguous().t())
    sharded = FSDP(model, device_id=torch.device("cpu"), use_orig_params=True)
    return sharded, torch.optim.SGD(sharded.parameters(), lr=0.1, momentum=0.9)


def saved_twice(*, transposed: bool) -> list[torch.Tensor]:
    """Momentum as it is saved, and as it is saved once more after loading."""
    model, optimizer = make(transposed=transposed)
    model(X).pow(3).sum().backward()
    optimizer.step()
    state = FSDP.optim_state_dict(model, optimizer)
    again, fresh = make(transposed=transposed)
    fresh.load_state_dict(FSDP.optim_state_dict_to_load(again, fresh, state))
    states = state, FSDP.optim_state_dict(again, fresh)
    return [one["state"]["weight"]["momentum_buffer"] for one in states]


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    for transposed in (False, True):
        saved, again = saved_twice(transposed=transposed)
        same, turned = torch.equal(saved, again), torch.equal(saved.t(), again)
        if rank == 0:
            print(f"transposed: {transposed}; loading keeps the momentum: {same}; transposes it: {turned}")
        assert (same, turned) == (not transposed, transposed), "fixed in this torch"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
