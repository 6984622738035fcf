"""The full model state: what the plain module would give, and back."""

from __future__ import annotations

import copy
import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from fsdp_ref import (
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
    fully_shard,
    state_dict_type,
)
from fsdp_ref.annotations import units_under
from fsdp_ref.errors import UnsupportedError
from fsdp_ref.states import TrainingState
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


def shard(api, module, strategy=ShardingStrategy.FULL_SHARD, units=(Inner,), **options):
    if api == "composable":
        return fully_shard(module, policy=ModuleWrapPolicy(units), strategy=strategy, **options)
    return FullyShardedDataParallel(
        module,
        auto_wrap_policy=ModuleWrapPolicy(units),
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


class Doubled(nn.Linear):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[prefix + "weight"] = self.weight.detach() * 2


@pytest.mark.parametrize("form", [StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT])
@pytest.mark.world(2)
def test_what_a_users_method_saves_is_saved_though_its_memory_is_used_again(world, api, form):
    plain = nn.Sequential(*(Doubled(300, 300, bias=False) for _ in range(6)))
    want = {name: param.detach() * 2 for name, param in plain.named_parameters()}
    model = shard(api, plain, units=())
    with state_dict_type(model, form):
        got = model.state_dict()
    whole = form is StateDictType.FULL_STATE_DICT
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name] if whole else got[name].full_tensor(), want[name]) for name in want)


class Versioned(nn.Linear):
    _version = 3

    def _load_from_state_dict(self, state, prefix, metadata, *others):
        self.loaded = metadata.get("version")
        super()._load_from_state_dict(state, prefix, metadata, *others)


@pytest.mark.parametrize("outermost", ["unit", "unit of units", "plain"])
@pytest.mark.world(2)
def test_versions_of_modules_are_those_of_the_plain_module(world, api, outermost):
    def make():
        return nn.Sequential(nn.Sequential(Versioned(4, 4)), nn.Sequential(Versioned(4, 4)))

    def loaded(model, state):
        model.load_state_dict(state)
        return [each.loaded for each in model.modules() if isinstance(each, Versioned)]

    model, plain = make(), make()
    if outermost == "plain":
        model = nn.Sequential(*(shard(api, each, units=(Versioned,)) for each in model))
    else:
        model = shard(api, model, units=(Versioned,) if outermost == "unit of units" else ())
    assert loaded(plain, model.state_dict()) == [3, 3]
    state = plain.state_dict()
    assert [loaded(model, state) for _ in range(2)] == [[3, 3]] * 2
    assert loaded(make(), state) == [3, 3]


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
def test_what_rank_0_sends_through_torchs_functions(world):
    """It goes by the names that ``named_parameters()`` shows, which a flat parameter hides."""
    state = {name: value * 2 for name, value in net().state_dict().items()}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for way in ("orig", "flat"):
        model = shard(way, net())
        kept = model.state_dict()
        refused = pytest.raises(UnsupportedError, match=r"one flat parameter .* of .*bias.* Pass use_orig_params=True")
        with refused if way == "flat" else nullcontext():
            set_model_state_dict(model, dict(state) if world.rank == 0 else {}, options=options)
        want = kept if way == "flat" else state
        assert all(torch.equal(value, want[name]) for name, value in model.state_dict().items())


class Raising(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("planted")


class Hollow(nn.Module):
    """Owns no parameter: all belong to the units below."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Inner(), Inner()
        self.fails = False

    def forward(self, x):
        x = self.first(x)
        return self.second(Raising.apply(x) if self.fails else x)


@pytest.mark.world(2)
@pytest.mark.parametrize("api", APIS)
def test_a_state_after_a_failed_backward_of_a_root_without_parameters(world, api):
    torch.manual_seed(0)
    plain = Hollow()
    want = {name: value.clone() for name, value in plain.state_dict().items()}
    # Two levels of units without parameters: the second is met after the first was summoned.
    model = shard(api, nn.Sequential(plain), units={Inner, Hollow})
    plain.fails = True
    with pytest.raises(ValueError, match="planted"):
        model(torch.ones(2, 4)).sum().backward()
    state = model.state_dict()
    assert {name.removeprefix("0.") for name in state} == set(want)
    assert all(torch.equal(value, want[name.removeprefix("0.")]) for name, value in state.items())
    plain.fails = False
    model(torch.ones(2, 4)).sum().backward()


class FailsToSave(nn.Module):
    """Raises while its state is collected, as often as it is asked to."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.failures = failures

    def forward(self, x):
        return self.lin(x)

    def _save_to_state_dict(self, *args, **kwargs):
        if self.failures:
            self.failures -= 1
            raise ValueError("planted")
        super()._save_to_state_dict(*args, **kwargs)


def sharded(api, failures):
    torch.manual_seed(0)
    plain = nn.Sequential(FailsToSave(failures), nn.Linear(4, 4))
    want = {name: param.detach().clone() for name, param in plain.named_parameters()}
    return shard(api, plain), want


@pytest.mark.world(2)
@pytest.mark.parametrize("api", APIS)
def test_a_state_after_one_that_could_not_be_collected(world, api):
    for form in StateDictType:
        model, want = sharded(api, failures=1)
        with state_dict_type(model, form), pytest.raises(ValueError, match="planted"):
            model.state_dict()
        state = model.state_dict()
        assert all(torch.equal(state[name], value) for name, value in want.items())
        model(torch.ones(2, 4)).sum().backward()


@pytest.mark.world(2)
@pytest.mark.parametrize("api", APIS)
def test_a_model_whose_state_could_not_be_collected_is_freed(world, api):
    model, _ = sharded(api, failures=1)
    with pytest.raises(ValueError, match="planted"):
        model.state_dict()
    watched = weakref.ref(model)
    del model
    gc.collect()
    assert watched() is None


@pytest.mark.parametrize("load", [False, True])
@pytest.mark.parametrize("api", APIS)
@pytest.mark.world(2)
def test_one_unit_at_a_time_is_full(world, api, load):
    model = shard(api, net())
    state = model.state_dict()
    found = [unit for _, _, unit in units_under(model)]
    full = []

    def count(*_):
        full.append(sum(unit.training_state is TrainingState.SUMMON_FULL_PARAMS for unit in found))

    for module in model.modules():
        if isinstance(module, nn.Linear):
            (module.register_load_state_dict_post_hook if load else module.register_state_dict_post_hook)(count)
    model.load_state_dict(state) if load else model.state_dict()
    assert len(full) == 4
    assert max(full) == 2 < len(found)  # the root around them, and one
