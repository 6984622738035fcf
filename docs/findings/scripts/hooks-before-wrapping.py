"""FSDP1 and FSDP2: a hook that a parameter has before it is wrapped never runs.

Run with torch alone: python hooks-before-wrapping.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


class Masked(nn.Linear):
    """Trains its first two rows alone."""

    def __init__(self, kind: str) -> None:
        super().__init__(4, 4, bias=False)
        mask = torch.tensor([1.0, 1.0, 0.0, 0.0])[:, None]
        if kind == "register_hook":
            self.weight.register_hook(lambda gradient: gradient * mask)
        else:
            self.weight.register_post_accumulate_grad_hook(
                lambda parameter: setattr(parameter, "grad", parameter.grad * mask)
            )


def masked_rows(wrap, kind: str) -> torch.Tensor:
    """Return how far the rows that must not train have moved."""
    torch.manual_seed(0)
    model = nn.Sequential(Masked(kind))
    before = model[0].weight.detach().clone()
    model = wrap(model)
    model(torch.randn(2, 4)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    if isinstance(model, FSDP):
        with FSDP.summon_full_params(model):
            after = next(model.parameters()).detach().clone()
    else:
        after = next(model.parameters()).detach()
        after = after.full_tensor() if hasattr(after, "full_tensor") else after
    return (after - before)[2:].abs().max()


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    ways = {
        "FSDP1": lambda model: FSDP(model, device_id=torch.device("cpu"), use_orig_params=True),
        "FSDP2": fully_shard,
        "DDP": DistributedDataParallel,
    }
    for name, wrap in ways.items():
        for kind in ("register_hook", "register_post_accumulate_grad_hook"):
            moved = float(masked_rows(wrap, kind))
            if rank == 0:
                print(f"{name}, {kind}: rows that are masked moved by {moved:.3f}")
            assert (moved > 0.01) == (name != "DDP"), "fixed in this torch"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
