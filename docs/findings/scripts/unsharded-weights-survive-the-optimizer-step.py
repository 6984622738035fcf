"""FSDP1 and FSDP2 roots, SHARD_GRAD_OP, reshard_after_forward=False: a forward before the step freezes the weights.

The forward gathers the weights and keeps them; the optimizer updates the shards; the next forward uses the old weights,
and FSDP1 saves them. Run with torch alone: python unsharded-weights-survive-the-optimizer-step.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard


def fsdp1(module: nn.Module, strategy: ShardingStrategy = ShardingStrategy.SHARD_GRAD_OP) -> nn.Module:
    return FullyShardedDataParallel(
        module, sharding_strategy=strategy, use_orig_params=True, device_id=torch.device("cpu")
    )


def fsdp1_full_shard(module: nn.Module) -> nn.Module:
    return fsdp1(module, ShardingStrategy.FULL_SHARD)


def fsdp2(module: nn.Module) -> nn.Module:
    return fully_shard(module, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)), reshard_after_forward=False)


def fsdp2_default(module: nn.Module) -> nn.Module:
    return fully_shard(module, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))


def after_step(wrap, *, evaluate_between: bool, no_grad=False, save=True, zeroed=False) -> torch.Tensor:
    """What the model computes after a step, or the weight that is saved then."""
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
        [parameter.zero_() for parameter in model.parameters() if zeroed]
    if save:
        return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))["weight"].clone()
    with torch.no_grad():
        return model(x)


def main(rank: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    for name, wrap, no_grad in (
        ("FSDP1", fsdp1, False),
        ("FSDP1 no_grad", fsdp1, True),
        ("FSDP1 FULL_SHARD", fsdp1_full_shard, False),
        ("FSDP2", fsdp2, False),
        ("FSDP2 no_grad", fsdp2, True),
        ("FSDP2 default", fsdp2_default, False),
    ):
        asked = [{"no_grad": no_grad, "save": save} for save in (False, True)]
        right = [after_step(wrap, evaluate_between=False, **one) for one in asked]
        wrong = [after_step(wrap, evaluate_between=True, **one) for one in asked]
        apart, lost = ((one - other).abs().max().item() for one, other in zip(right, wrong))
        if rank == 0:
            print(f"{name}: a forward before the step changes outputs by {apart:.1f}, what is saved by {lost:.1f}")
        assert apart > 1, f"fixed in this torch: {name} uses the new weights"
        assert (lost > 1) == name.startswith("FSDP1"), f"{name} saves other weights than expected"
    assert not after_step(fsdp2_default, evaluate_between=False, zeroed=True).any()
    assert after_step(fsdp2_default, evaluate_between=True, zeroed=True).any(), "fixed in this torch: edits are kept"
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, (f"{folder}/store",), nprocs=2, start_method="fork")
