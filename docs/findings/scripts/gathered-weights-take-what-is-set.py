"""FSDP1, FSDP2: what is set on a model that a forward without backward left gathered is lost, or kept where it must not be.

Run with torch alone: python gathered-weights-take-what-is-set.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy, fully_shard

X, ZERO2 = torch.ones(2, 2), ShardingStrategy.SHARD_GRAD_OP


def fsdp1(strategy: ShardingStrategy) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight.requires_grad_(False)
    return FSDP(model, sharding_strategy=strategy, use_orig_params=True, device_id=torch.device("cpu"))


def read_only_edit_stays(forward: bool) -> bool:
    model = fsdp1(ShardingStrategy.FULL_SHARD)
    _ = model(X) if forward else None
    with FSDP.summon_full_params(model, writeback=False), torch.no_grad():
        [parameter.mul_(-1) for parameter in model.parameters()]
    return not torch.equal(model(X), fsdp1(ShardingStrategy.FULL_SHARD)(X))


def thawing_is_lost(forward: bool) -> bool:
    model = fsdp1(ZERO2)
    _ = model(X) if forward else None
    model.requires_grad_(True)(X).sum().backward()
    return not all(parameter.requires_grad for parameter in model.parameters())


def freezing_raises(forward: bool) -> bool:
    model = fsdp1(ZERO2)
    _ = model(X) if forward else None
    try:
        return model.requires_grad_(False) is None
    except RuntimeError as error:
        return "you can only change requires_grad flags of leaf variables" in str(error)


def clearing_is_lost(forward: bool, fsdp2: bool = False, by_hand: bool = False) -> bool:
    model, totals = fully_shard(nn.Linear(2, 2)) if fsdp2 else fsdp1(ZERO2), []
    for _ in range(2):
        model(X).sum().backward()
        totals.append(sum(float(p.grad.norm()) for p in model.parameters() if p.grad is not None))
        _ = model(X) if forward else None
        model.zero_grad() if not by_hand else [setattr(p, "grad", None) for p in model.parameters()]
    return totals[1] == 2 * totals[0]


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    defects = {
        "FSDP1 FULL_SHARD, an edit with writeback=False stays": read_only_edit_stays,
        "FSDP1 SHARD_GRAD_OP, thawing is lost": thawing_is_lost,
        "FSDP1 SHARD_GRAD_OP, freezing raises": freezing_raises,
        "FSDP1 SHARD_GRAD_OP, model.zero_grad() clears nothing": clearing_is_lost,
        "FSDP1 SHARD_GRAD_OP, p.grad = None clears nothing": lambda forward: clearing_is_lost(forward, by_hand=True),
        "FSDP2, model.zero_grad() clears nothing": lambda forward: clearing_is_lost(forward, fsdp2=True),
        "FSDP2, p.grad = None clears nothing": lambda forward: clearing_is_lost(forward, fsdp2=True, by_hand=True),
    }
    for name, happens in defects.items():
        without, after = happens(False), happens(True)
        print(f"{name}: {after} after a forward without backward, else {without}") if rank == 0 else None
        assert (after, without) == (True, False), "another outcome than in torch 2.13"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
