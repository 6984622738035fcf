"""What `state_dict()` hands out and `load_state_dict()` takes, where shipped implementations went wrong."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fsdp_ref import CPUOffload, MixedPrecision, ShardingStrategy
from fsdp_ref.composable import fully_shard, no_sync
from fsdp_ref.wrap import ModuleWrapPolicy


class Left(nn.Module):
    """A module that sharding leaves alone: a parameter, buffers of several dtypes, one not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), 1.0 + 2.0**-20))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("passing", torch.ones(4), persistent=False)

    def forward(self, x):
        return self.layer(x.to(self.scale.dtype)) * self.scale * self.passing


class Holder(nn.Module):
    """A unit around a module that is left alone, under one more wrap."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.left = Left()
        self.after = nn.Linear(4, 4)

    def forward(self, x):
        y = self.left(self.before(x)).to(x.dtype)
        return self.after(y)


class Levels(nn.Module):
    """Holders at several depths: names are made of one prefix per level."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(3, 4)
        self.a = nn.Sequential(nn.Sequential(Holder()))
        self.b = Holder()

    def forward(self, x):
        return self.b(self.a(self.inp(x)))


def lefts(model):
    return [module for module in model.modules() if isinstance(module, Left)]


@pytest.mark.world(2)
@pytest.mark.covers("B066", "B104", "SD-19", "SD-02")
@pytest.mark.parametrize("low", [None, torch.bfloat16], ids=str)
def test_what_is_ignored_is_saved_as_it_is_under_its_own_name(lab, path, low):
    reference = lab.make(Levels, dtype=torch.float32)
    model = copy.deepcopy(reference)
    left = lefts(model)
    live = {
        name: t for module in left for name, t in module.state_dict(keep_vars=True, prefix=f"{id(module)}.").items()
    }
    objects = {id(t) for t in live.values()}
    precision = MixedPrecision(low, buffer_dtype=low) if low else None
    options = {"mixed_precision": precision, "policy": {Holder}, "ignored_modules": left}
    if path == "composable":
        fully_shard(model.a[0], policy=ModuleWrapPolicy({Holder}), mixed_precision=precision, ignored_modules=left)
    model = lab.shard(model, path, **options)
    batch = lab.batch().float()
    with torch.no_grad():
        model(batch)
    state = model.state_dict()
    assert list(state) == list(reference.state_dict())
    inside = [name for name in state if ".left." in name]
    assert len(inside) == 8  # two of them, each with a weight, a bias and two buffers
    storages = {t.untyped_storage().data_ptr() for t in live.values()}
    for name in inside:
        assert state[name].untyped_storage().data_ptr() in storages, name
        assert state[name].dtype == reference.state_dict()[name].dtype, name
        assert torch.equal(state[name], reference.state_dict()[name]), name
    assert {id(t) for module in lefts(model) for t in module.state_dict(keep_vars=True).values()} == objects
    # The managed entries are copies: they outlive the full parameters that they were read from.
    for name in set(state) - set(inside):
        assert torch.equal(state[name], reference.state_dict()[name]), name


@pytest.mark.world(2)
@pytest.mark.covers("B104", "SD-02")
@pytest.mark.parametrize("offload", [False, True])
def test_buffers_are_handed_out_and_not_copied(lab, path, offload):
    model = lab.shard(lab.make(), path, policy={lab.Block}, cpu_offload=CPUOffload(offload))
    lab.loss(model, lab.batch()).backward()
    state = model.state_dict()
    assert {value.device.type for value in state.values()} == {"cpu"}
    live = [block.scale for block in model.modules() if isinstance(block, lab.Block)]
    saved = [value for name, value in state.items() if name.endswith("scale")]
    assert [t.data_ptr() for t in saved] == [t.data_ptr() for t in live]
    assert len(saved) == 3


# ------------------------------------------------------------------------------------------------- inside groups


@pytest.mark.world(4)
@pytest.mark.covers("B098", "HYB-05")
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD], ids=lambda s: s.name)
def test_saving_and_loading_stay_inside_the_units_groups(lab, path, strategy):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    shard, replicate = pairs[lab.world.rank // 2], columns[lab.world.rank % 2]
    group = (shard, replicate) if strategy is ShardingStrategy.HYBRID_SHARD else shard
    reference = lab.make()
    model = lab.shard(
        copy.deepcopy(reference), path, policy={lab.Block}, sharding_strategy=strategy, process_group=group
    )
    changed = {name: value + 1 for name, value in reference.state_dict().items()}
    if lab.world.rank < 2:
        # The other pair is elsewhere: whoever asked it to join would wait until the test's time is over.
        with lab.collectives() as seen:
            state = {name: value.clone() for name, value in model.state_dict().items()}
            model.load_state_dict(changed)
            again = model.state_dict()
        assert {id(call.group) for call in seen} == {id(shard)}
        assert len(seen) == 3 * len([unit for unit in lab.units(model) if unit.handle])
        lab.assert_same(state, reference.state_dict(), rtol=0.0, atol=0.0)
        lab.assert_same(again, changed, rtol=0.0, atol=0.0)
    # `new_group` returns before its peers have connected: whoever destroys the group first would break their connections.
    lab.world.barrier()
    for made in (*pairs, *columns):
        if lab.world.rank in dist.get_process_group_ranks(made):
            dist.destroy_process_group(made)


class Mixed(nn.Module):
    """A part for DistributedDataParallel around a part that is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(3, 4)
        self.part = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4))
        self.out = nn.Linear(4, 1)

    def forward(self, x):
        return self.out(self.part(self.inp(x)))


@pytest.mark.world(2)
@pytest.mark.covers("B103")
def test_sharded_parts_under_distributed_data_parallel(lab, path):
    reference = lab.make(Mixed)
    model = copy.deepcopy(reference)
    model.part = lab.shard(model.part, path)
    apart = [name for name, _ in model.named_parameters() if name.startswith("part.")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, apart)
    around = DistributedDataParallel(model)
    optim = torch.optim.Adam(around.parameters(), lr=0.05)
    reference_optim = torch.optim.Adam(reference.parameters(), lr=0.05)
    for step in range(3):
        lab.loss(around, lab.batch(step)).backward()
        optim.step()
        optim.zero_grad()
        lab.reference_step(reference, lab.batches(step), optim=reference_optim)
    state = around.state_dict()
    want = {f"module.{name}": value for name, value in reference.state_dict().items()}
    assert list(state) == list(want)
    lab.assert_same(state, want)
    changed = {name: value + 1 for name, value in want.items()}
    around.load_state_dict(changed)
    lab.assert_same(around.state_dict(), changed, rtol=0.0, atol=0.0)


# -------------------------------------------------------------------------------------------------- ways of loading


@pytest.mark.world(3)
@pytest.mark.covers("B153", "SD-13", "SD-26")
@pytest.mark.parametrize("moment", ["new", "forward", "trained", "kept", "offloaded"])
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("strict", [True, False])
def test_loaded_values_are_what_computes(lab, path, strict, assign, moment):
    reference = lab.make()
    strategy = ShardingStrategy.SHARD_GRAD_OP if moment == "kept" else ShardingStrategy.FULL_SHARD
    options = {"sharding_strategy": strategy, "cpu_offload": CPUOffload(moment == "offloaded")}
    model = lab.shard(copy.deepcopy(reference), path, policy={lab.Block}, **options)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if moment == "trained":
        lab.loss(model, lab.batch(9)).backward()
        optim.step()
        optim.zero_grad()
    elif moment == "forward":
        model(lab.batch(9))  # no backward follows: what is gathered is out of date after loading
    elif moment == "kept":
        with no_sync(model):
            lab.loss(model, lab.batch(9)).backward()  # full parameters stay for the next forward
        assert all(unit.handle.unsharded for unit in lab.units(model))
        optim.zero_grad()
    held = list(model.parameters())
    state = {name: value + 0.5 for name, value in lab.make(seed=7).state_dict().items()}
    if not strict:
        del state["blocks.1.lin2.weight"], state["out.weight"]
        state["stranger"] = torch.zeros(1)
    source = {name: value.clone() for name, value in state.items()}
    kept = {name: value for name, value in model.state_dict().items() if name not in state}
    result = model.load_state_dict(state, strict=strict, assign=assign)
    want = {**kept, **{name: value for name, value in source.items() if name != "stranger"}}
    assert sorted(result.missing_keys) == sorted(kept)
    assert result.unexpected_keys == ([] if strict else ["stranger"])
    lab.assert_same(model.state_dict(), want, rtol=0.0, atol=0.0)
    # The optimizer steps what users hold: the objects must still be the ones that compute.
    assert [a is b for a, b in zip(model.parameters(), held, strict=True)] == [True] * len(held)
    reference.load_state_dict(want)
    reference_optim = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        lab.loss(model, lab.batch(step)).backward()
        optim.step()
        optim.zero_grad()
        lab.reference_step(reference, lab.batches(step), optim=reference_optim)
        lab.assert_params(model, reference)
    lab.assert_same(state, source, rtol=0.0, atol=0.0)  # training went on in memory of its own


@pytest.mark.world([2, 3])
@pytest.mark.covers("B102")
@pytest.mark.parametrize("assign", [False, True])
def test_a_loaded_shard_keeps_no_full_tensor_alive(lab, path, assign):
    model = lab.shard(lab.make(), path, policy={lab.Block})
    model.load_state_dict(lab.make(seed=3).state_dict(), assign=assign)
    optim = torch.optim.Adam(model.parameters(), lr=0.1)
    for step in range(2):
        lab.loss(model, lab.batch(step)).backward()
        optim.step()
    optim.load_state_dict(copy.deepcopy(optim.state_dict()))
    for unit in lab.units(model):
        handle = unit.handle
        shard_bytes = handle.shard_map.shard_numel * handle.shard_S.element_size()
        assert handle.shard_S.untyped_storage().nbytes() == shard_bytes
        assert handle.grads.reduced_S.untyped_storage().nbytes() == shard_bytes
        full_bytes = handle.shard_map.padded_numel * handle.shard_S.element_size()
        assert full_bytes == lab.world.size * shard_bytes  # so that the above can tell one from the other
        shown = handle.originals.params if handle.originals.use_orig_params else [handle.flat_param]
        for param in shown:
            assert param.untyped_storage().nbytes() == shard_bytes
            for name, value in optim.state[param].items():
                own = value.numel() * value.element_size()
                assert value.untyped_storage().nbytes() == own, name


class Counted(nn.Module):
    """Parameters and buffers, one of them not saved; filled with NaN by whoever forgets to fill them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.layer = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(5.0))
        self.register_buffer("passing", torch.full((2,), 3.0), persistent=False)

    def forward(self, x):
        return self.layer(self.norm(x)) * self.table[1] * self.passing[0]


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(3, 4)
        self.parts = nn.ModuleList(Counted() for _ in range(2))

    def forward(self, x):
        x = self.inp(x)
        for part in self.parts:
            x = part(x)
        return x


def undefined(module):
    """Memory as it comes: on the ranks that load nothing, no value may survive."""
    module.to_empty(device="cpu", recurse=False)
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        tensor.data.fill_(float("nan") if tensor.is_floating_point() else 99)


@pytest.mark.world([2, 3])
@pytest.mark.covers("B157", "SD-23", "META-07", "SYNC-02")
def test_a_checkpoint_that_only_rank_zero_loads(lab, path):
    saved = lab.make(Stack, seed=5)
    with torch.no_grad():
        saved(lab.batch(rank=0))  # running statistics of its own
    if lab.world.rank == 0:
        model = lab.make(Stack)
        model.load_state_dict(saved.state_dict())
    else:
        with torch.device("meta"):
            model = Stack().double()
    model = lab.shard(model, path, policy={Counted}, sync_module_states=True, param_init_fn=undefined)
    state = model.state_dict()
    assert [name for name in state if "running" in name or "table" in name or "batches" in name]
    lab.assert_same(state, saved.state_dict(), rtol=0.0, atol=0.0)
    live = {name.replace("_fsdp_wrapped_module.", ""): value for name, value in model.named_buffers()}
    lab.assert_same(live, dict(saved.named_buffers()), rtol=0.0, atol=0.0)
    assert model(lab.batch()).isfinite().all()


@pytest.mark.world(2)
@pytest.mark.covers("B092", "SD-01")
def test_full_states_where_some_ranks_hold_nothing(lab, path):
    """One element on two ranks: the second holds none of it, and saves and loads all of it."""

    def tiny():
        return nn.Sequential(nn.Linear(1, 1, bias=False))

    model = lab.shard(lab.make(tiny), path)
    handle = lab.units(model)[0].handle
    assert not list(handle.shard_map.param_spans(1))
    want = lab.make(tiny).state_dict()
    lab.assert_same(model.state_dict(), want, rtol=0.0, atol=0.0)
    changed = {name: value + 1 for name, value in want.items()}
    model.load_state_dict(changed)
    lab.assert_same(model.state_dict(), changed, rtol=0.0, atol=0.0)
