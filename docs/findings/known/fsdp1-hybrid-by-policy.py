"""FSDP1: hybrid sharding by a policy, without groups, never averages on a host without accelerators."""

from ranks import data, fsdp1, mean, mlp, off, show
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import always_wrap_policy


def defect(rank):
    plain = mlp(1)
    plain(data(rank)).sum().backward()
    model = fsdp1(mlp(1), sharding_strategy=ShardingStrategy.HYBRID_SHARD, auto_wrap_policy=always_wrap_policy)
    model(data(rank)).sum().backward()
    weight = next(parameter for name, parameter in model.named_parameters() if name.endswith("weight"))
    return off("the weight's gradient", weight.grad.reshape(4, 4), mean(plain[0].weight.grad))


show(defect)
