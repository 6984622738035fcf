"""FSDP1's compressing hooks raise on the CPU, and so does DDP's for bfloat16; DDP's for float16 works.

Run with torch alone: python compressing-hooks-need-accelerators.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks as hooks_of_fsdp
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as hooks_of_ddp
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel


def train(model: nn.Module, state: object, hook: object) -> str:
    try:
        model.register_comm_hook(state, hook)
        model(torch.ones(2, 4)).sum().backward()
    except (RuntimeError, TypeError) as error:
        return str(error)
    return "trains"


def main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    says = {}
    for name in ("fp16_compress_hook", "bf16_compress_hook"):
        model = FullyShardedDataParallel(nn.Linear(4, 4), use_orig_params=True, device_id=torch.device("cpu"))
        state = hooks_of_fsdp.LowPrecisionState(dist.group.WORLD)
        says[f"FSDP1, {name}"] = train(model, state, getattr(hooks_of_fsdp, name))
        says[f"DDP, {name}"] = train(DistributedDataParallel(nn.Linear(4, 4)), None, getattr(hooks_of_ddp, name))
    if rank == 0:
        print("\n".join(f"{case}: {text}" for case, text in says.items()))
    assert says["DDP, fp16_compress_hook"] == "trains"
    assert "BF16 all reduce" in says["DDP, bf16_compress_hook"], "fixed in this torch"
    assert says["FSDP1, fp16_compress_hook"] == "unknown parameter type", "fixed in this torch"
    assert says["FSDP1, bf16_compress_hook"] == "unknown parameter type", "fixed in this torch"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (folder,), nprocs=2, start_method="fork")
