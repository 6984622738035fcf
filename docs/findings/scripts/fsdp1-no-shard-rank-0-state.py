"""With NO_SHARD each rank gets the whole state, although rank 0 alone was asked for.

Run with torch alone: python fsdp1-no-shard-rank-0-state.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, ShardingStrategy, StateDictType

ALONE = FullStateDictConfig(rank0_only=True)


def names_saved(strategy: ShardingStrategy) -> list[str]:
    options = {"sharding_strategy": strategy, "use_orig_params": True, "device_id": torch.device("cpu")}
    model = FullyShardedDataParallel(nn.Linear(4, 4), **options)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, ALONE):
        return sorted(model.state_dict())


def main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    sharded, replicated = names_saved(ShardingStrategy.FULL_SHARD), names_saved(ShardingStrategy.NO_SHARD)
    if rank == 1:
        print(f"rank 1: FULL_SHARD {sharded}, NO_SHARD {replicated}")
        assert sharded == []
        assert replicated == ["bias", "weight"], "fixed in this torch"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (folder,), nprocs=2, start_method="fork")
