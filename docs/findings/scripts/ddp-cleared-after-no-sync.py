"""DDP: what was used inside no_sync, cleared to None and not used afterwards makes the next reduction raise.

Run with torch alone: python ddp-cleared-after-no-sync.py
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(2, 2)
        self.last = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, used: bool) -> torch.Tensor:
        return self.last(self.part(x) if used else x)


def main(rank: int, path: str, local: bool, to_none: bool, said: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    model = DistributedDataParallel(Model(), find_unused_parameters=True)
    x = torch.ones(2, 2)
    if local:
        with model.no_sync():
            model(x, used=True).sum().backward()
    model.zero_grad(set_to_none=to_none)
    what = "runs"
    try:
        model(x, used=False).sum().backward()
    except RuntimeError as error:
        what = str(error)[:39]
    if rank == 0:
        Path(said).write_text(what)


def outcome(local: bool, to_none: bool) -> str:
    with tempfile.TemporaryDirectory() as folder:
        arguments = (f"{folder}/store", local, to_none, f"{folder}/said")
        mp.start_processes(main, args=arguments, nprocs=2, start_method="fork")
        return Path(f"{folder}/said").read_text()


if __name__ == "__main__":
    for local, to_none in ((False, True), (True, False), (True, True)):
        what = outcome(local, to_none)
        print(f"no_sync before: {local}; cleared to None: {to_none}; {what}", flush=True)
        due = "Encountered gradient which is undefined" if local and to_none else "runs"
        assert what == due, "another outcome than in torch 2.13"
