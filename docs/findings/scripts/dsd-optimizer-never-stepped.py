"""get_optimizer_state_dict of an optimizer that never stepped counts one step, and the next real step is another one.

Run with torch alone: python dsd-optimizer-never-stepped.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard


def fsdp1(module: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(module, use_orig_params=True, device_id=torch.device("cpu"))


def steps_and_weight(wrap, *, save: bool) -> tuple[list[float], float]:
    """Step counters right before the first step, and the sum of the weights right after it."""
    torch.manual_seed(0)
    model = wrap(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-3)
    if save:
        get_optimizer_state_dict(model, optimizer)
    counted = [float(state["step"]) for state in optimizer.state.values()]
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    total = torch.stack([getattr(p, "to_local", lambda p=p: p)().detach().sum() for p in model.parameters()]).sum()
    dist.all_reduce(total)
    return counted, total.item()


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    for wrap in (fsdp1, fully_shard):
        (none, plain), (counted, saved) = (steps_and_weight(wrap, save=save) for save in (False, True))
        if rank == 0:
            print(
                f"{wrap.__name__}: saved before the first step, counters {counted}; weights {plain:.6f} -> {saved:.6f}"
            )
        assert not none
        assert 1.0 in counted, "fixed in this torch: nothing is counted"
        assert abs(plain - saved) > 1e-3, "fixed in this torch: the first step is the same"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
