"""DDP: a forward that leaves a part out and that no backward follows makes a later backward raise or hang.

Run with torch alone: python ddp-forward-then-no-sync.py
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


def main(rank: int, path: str, forward: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    model = DistributedDataParallel(Model(), find_unused_parameters=True)
    x = torch.ones(2, 2)
    if forward != "none":
        # Not used by rank 1 ("differs") or by nobody.
        with torch.no_grad() if forward == "no_grad" else torch.enable_grad():
            model(x, used=forward == "differs" and rank == 0)
    with model.no_sync():
        model(x, used=True).sum().backward()
    model(x, used=True).sum().backward()
    dist.destroy_process_group()


def wait(process: mp.Process) -> None:
    """Wait until the process ends, or has computed nothing for ten seconds: one that is slow does not hang."""
    spent, before = "", None
    while process.is_alive() and spent != before:
        process.join(10)
        before, spent = spent, cpu(process.pid) if process.is_alive() else ""


def cpu(pid: int) -> str:
    """Return the ticks that a process has computed, in user code and in the system."""
    return " ".join(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13])


def outcome(forward: str) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("fork")
        ranks = [context.Process(target=main, args=(rank, f"{folder}/store", forward)) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            wait(process)
        told = ["hangs" if p.is_alive() else "runs" if p.exitcode == 0 else "fails" for p in ranks]
        for process in ranks:
            process.kill()
        return told


if __name__ == "__main__":
    for forward in ("none", "no_grad", "nobody", "differs"):
        told = outcome(forward)
        print(f"forward before: {forward}; ranks: {told}", flush=True)
        assert (told == ["runs", "runs"]) == (forward in ("none", "no_grad")), "another outcome than in torch 2.13"
