"""A save over an earlier directory that is killed leaves a mixture of both, which loads without an error.

Run with torch alone: python dcp-overwrites-in-place.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.tensor import Shard, distribute_tensor


def state(value: float) -> dict[str, torch.Tensor]:
    mesh = dist.init_device_mesh("cpu", (2,))
    return {"weight": distribute_tensor(torch.full((4,), value), mesh, [Shard(0)])}


def join(rank: int, folder: str, run: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{run}", rank=rank, world_size=2)


def save_first(rank: int, folder: str) -> None:
    join(rank, folder, 1)
    dcp.save(state(1.0), checkpoint_id=f"{folder}/checkpoint")


class Slow(dcp.FileSystemWriter):
    """Rank 1 is slower than rank 0: when all are killed it has written nothing."""

    def __init__(self, path: str, written: object, never: object) -> None:
        super().__init__(path)
        self.written, self.never = written, never

    def write_data(self, plan: object, planner: object) -> object:
        if dist.get_rank() == 1:
            self.never.wait()
        done = super().write_data(plan, planner)
        done.wait()
        self.written.set()
        return done


def save_second(rank: int, folder: str, *events: object) -> None:
    join(rank, folder, 2)
    dcp.save(state(2.0), storage_writer=Slow(f"{folder}/checkpoint", *events))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(save_first, (folder,), nprocs=2, start_method="fork")
        context = mp.get_context("fork")
        written, never = context.Event(), context.Event()
        arguments = [(rank, folder, written, never) for rank in range(2)]
        ranks = [context.Process(target=save_second, args=each, daemon=True) for each in arguments]
        for process in ranks:
            process.start()
        assert written.wait(60)
        for process in ranks:
            process.kill()
            process.join()
        loaded = {"weight": torch.zeros(4)}
        dcp.load(loaded, checkpoint_id=f"{folder}/checkpoint", no_dist=True)
        print(f"saved all 1, then killed while all 2 was saved; loaded: {loaded['weight'].tolist()}")
        assert loaded["weight"].tolist() == [2.0, 2.0, 1.0, 1.0], "fixed in this torch"
