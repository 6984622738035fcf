"""FSDP2: gradients of a failed backward are in the next step, though `reset_iter_state` says that it discards them.

Run with torch alone: python fsdp2-reset-keeps-gradients.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard


class Failure(Exception):
    pass


def fail(_) -> None:
    raise Failure


def gradients(*, fails: bool, clears: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model)
    inputs = torch.randn(2, 4)
    if fails:
        handle = model[0].register_forward_hook(lambda _m, _i, output: output.register_hook(fail) and None)
        try:
            model(inputs).sum().backward()
        except Failure:
            handle.remove()
            model.reset_iter_state()
            model.zero_grad()
        if clears:
            model.unshard()
            model.zero_grad()
            model.reshard()
    model(inputs).sum().backward()
    return [parameter.grad.full_tensor() for parameter in model.parameters()]


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    expected, got, cleared = gradients(fails=False), gradients(fails=True), gradients(fails=True, clears=True)
    off = [float((mine - right).abs().max()) for mine, right in zip(got, expected)]
    if rank == 0:
        print("off by", off)
    assert max(off) > 0.1, "fixed in this torch"
    assert all(torch.equal(mine, right) for mine, right in zip(cleared, expected))
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
