"""The full model state: what the plain module would give, and back."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fsdp_ref import FullyShardedDataParallel, MixedPrecision, ShardingStrategy, fully_shard
from fsdp_ref.wrap import ModuleWrapPolicy

APIS = ["flat", "orig", "composable"]


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("mean", torch.full((3,), 1.25, dtype=torch.float64))
        self.register_buffer("passing", torch.ones(2), persistent=False)

    def forward(self, x):
        return self.lin(x)


def net():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Inner(), Inner()), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    model.register_buffer("count", torch.zeros(1, dtype=torch.int64))
    return model


def shard(api, module, strategy=ShardingStrategy.FULL_SHARD, **options):
    if api == "composable":
        return fully_shard(module, policy=ModuleWrapPolicy({Inner}), strategy=strategy, **options)
    return FullyShardedDataParallel(
        module,
        auto_wrap_policy=ModuleWrapPolicy({Inner}),
        sharding_strategy=strategy,
        use_orig_params=api == "orig",
        **options,
    )


@pytest.mark.covers("SD-01", "SD-02", "SD-10", "SD-11", "SD-13", "SD-17", "SD-18", "SD-22", "B014", "B015", "COMP-11")
@pytest.mark.parametrize("moment", ["new", "between", "trained"])
@pytest.mark.parametrize("api", APIS)
@pytest.mark.world(2)
def test_round_trip(world, api, moment):
    plain = net()
    model = shard(api, copy.deepcopy(plain))
    loss = None
    if moment != "new":
        loss = model(torch.ones(2, 4)).sum()
    if moment == "trained":
        loss.backward()
    saved = model.state_dict()
    want = plain.state_dict()
    assert list(saved) == list(want)
    assert all(torch.equal(value, want[name]) for name, value in saved.items())
    if moment == "between":
        loss.backward()
    other = shard(api, net().apply(lambda m: nn.init.zeros_(m.weight) if isinstance(m, nn.Linear) else None))
    assert not any(torch.equal(other.state_dict()[name], want[name]) for name in want if name.endswith("weight"))
    changed = {name: value + 1 for name, value in want.items()}
    other.load_state_dict(changed)
    assert all(torch.equal(value, changed[name]) for name, value in other.state_dict().items())
    other(torch.ones(2, 4)).sum().backward()
    net().load_state_dict(other.state_dict())
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "0.weight"'):
        other.load_state_dict({name: value for name, value in want.items() if name != "0.weight"})
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "1.0.extra"'):
        other.load_state_dict({**want, "1.0.extra": torch.ones(1)})
    assert {name.split(".")[0] for name in model.state_dict(prefix="a.")} == {"a"}


@pytest.mark.covers("SD-15", "SD-21", "MP-15", "B001", "B064")
@pytest.mark.world(2)
def test_buffers_come_back_in_their_own_dtype(world):
    low = torch.bfloat16
    model = shard("orig", net(), mixed_precision=MixedPrecision(low, buffer_dtype=low))
    model(torch.ones(2, 4))
    state = model.state_dict()
    assert state["1.0.mean"].dtype == torch.float64
    assert state["0.weight"].dtype == torch.float32
    assert model.module[1][0].mean.dtype == low


@pytest.mark.covers("SD-25")
@pytest.mark.world(2)
def test_units_below_a_plain_root(world):
    plain = net()
    want = plain.state_dict()
    model = copy.deepcopy(plain)
    model[1] = FullyShardedDataParallel(model[1], use_orig_params=True)
    assert all(torch.equal(value, want[name]) for name, value in model.state_dict().items())
    assert set(model.state_dict()) == set(want)
    model.load_state_dict({name: value * 2 for name, value in want.items()})
    assert all(torch.equal(value, want[name] * 2) for name, value in model.state_dict().items())


@pytest.mark.world(2)
def test_what_is_not_there_yet_says_so(world):
    model = shard("orig", net())
    with pytest.raises(NotImplementedError, match="optim_state_dict: .*not there yet"):
        FullyShardedDataParallel.optim_state_dict(model, None)
