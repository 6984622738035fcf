"""FSDP1 NO_SHARD, use_orig_params=True, float16: the forward after no_sync raises if a module has two names.

Run with torch alone: python fsdp1-no-shard-shared-low-precision.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy

STRATEGIES = (ShardingStrategy.NO_SHARD, ShardingStrategy.FULL_SHARD)


class Model(nn.Module):
    def __init__(self, *, twice: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        if twice:
            self.other = self.layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def error_of(strategy: ShardingStrategy, *, orig: bool, twice: bool, any_grad_dtype: bool = False) -> str:
    torch.manual_seed(0)
    model = FullyShardedDataParallel(
        Model(twice=twice),
        sharding_strategy=strategy,
        mixed_precision=MixedPrecision(param_dtype=torch.float16),
        use_orig_params=orig,
        device_id=torch.device("cpu"),
    )
    if any_grad_dtype:
        for parameter in model.parameters():
            parameter.grad_dtype = None
    x = torch.randn(2, 4)
    with model.no_sync():
        model(x).float().sum().backward()
    try:
        model(x).float().sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    for strategy, orig, twice in [(s, o, t) for s in STRATEGIES for o in (True, False) for t in (True, False)]:
        error = error_of(strategy, orig=orig, twice=twice)
        if rank == 0:
            print(f"{strategy.name}, use_orig_params={orig}, {1 + twice} name(s): {error.split('.')[0] or 'trains'}")
        affected = strategy is ShardingStrategy.NO_SHARD and orig and twice
        assert ("attempting to assign a gradient with dtype" in error) == affected, "fixed in this torch"
    assert not error_of(ShardingStrategy.NO_SHARD, orig=True, twice=True, any_grad_dtype=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
