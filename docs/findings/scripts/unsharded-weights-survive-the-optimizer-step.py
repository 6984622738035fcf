"""FSDP1 SHARD_GRAD_OP, FSDP2 roots and reshard_after_forward=False: a forward before the step freezes the weights.

The forward gathers the weights and keeps them; no backward frees them; the optimizer updates the shards; the next
forward finds weights that are gathered already and uses the old ones. Run with torch alone:
python unsharded-weights-survive-the-optimizer-step.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard


def fsdp1(module: nn.Module) -> nn.Module:
    strategy = ShardingStrategy.SHARD_GRAD_OP
    return FullyShardedDataParallel(
        module, sharding_strategy=strategy, use_orig_params=True, device_id=torch.device("cpu")
    )


def fsdp2(module: nn.Module) -> nn.Module:
    return fully_shard(module, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)), reshard_after_forward=False)


def fsdp2_default(module: nn.Module) -> nn.Module:
    return fully_shard(module, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))


def outputs(wrap, *, evaluate_between: bool, no_grad: bool) -> torch.Tensor:
    torch.manual_seed(0)
    model = wrap(nn.Linear(4, 4, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    x = torch.ones(2, 4)
    model(x).sum().backward()
    if evaluate_between:
        with torch.set_grad_enabled(not no_grad):
            model(x)
    optimizer.step()
    with torch.no_grad():
        return model(x)


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    for name, wrap, no_grad in (
        ("FSDP1", fsdp1, False),
        ("FSDP1 no_grad", fsdp1, True),
        ("FSDP2", fsdp2, False),
        ("FSDP2 no_grad", fsdp2, True),
        ("FSDP2 default", fsdp2_default, False),
    ):
        right = outputs(wrap, evaluate_between=False, no_grad=no_grad)
        wrong = outputs(wrap, evaluate_between=True, no_grad=no_grad)
        apart = (right - wrong).abs().max().item()
        if rank == 0:
            print(f"{name}: with and without an evaluation before the step, outputs are {apart:.3f} apart")
        assert apart > 1, f"fixed in this torch: {name} uses the new weights"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
