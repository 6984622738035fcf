"""A head that is called by itself multiplies by a piece of its weight, or ends the process.

Run with torch alone: python fsdp1-module-called-outside-forward.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * self.gain


def main(rank: int, folder: str, use_orig_params: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    inside: nn.Module = nn.Linear(8, 2, bias=False) if use_orig_params else Gain()
    rows = torch.ones(3, 8)
    expected = inside(rows)
    options = {"use_orig_params": use_orig_params, "device_id": torch.device("cpu")}
    # Inside another unit: a root stays gathered after a forward that no backward follows.
    model = FullyShardedDataParallel(
        nn.Sequential(FullyShardedDataParallel(nn.Sequential(inside), **options)), **options
    )
    assert torch.equal(model(rows), expected)
    with torch.no_grad():
        got = inside(rows)
    print(f"rank {rank}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
    assert got.shape != expected.shape, "fixed in this torch"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (folder, True), nprocs=2, start_method="fork")
    with tempfile.TemporaryDirectory() as folder:
        signal = ""
        try:
            mp.start_processes(main, (folder, False), nprocs=2, start_method="fork")
        except mp.ProcessExitedException as error:
            signal = error.signal_name
    print(signal)
    assert signal == "SIGSEGV", "fixed in this torch"
