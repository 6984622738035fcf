"""Optimizer state: that of one process, whole or sharded, saved under any layout and loaded under any other."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import fsdp_ref
from fsdp_ref import (
    FullOptimStateDictConfig,
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    StateDictType,
    optim_state_dict,
    optim_state_dict_to_load,
    state_dict_type,
)
from fsdp_ref.checkpoint import optim_save
from fsdp_ref.handle.flat_handle import FlatHandle
from fsdp_ref.storage.views import flat_views

FULL, SHARDED, LOCAL = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT
APIS = ["flat", "orig", "composable"]
LAYOUTS = [
    "flat FULL_SHARD wrapped",
    "orig SHARD_GRAD_OP whole",
    "composable FULL_SHARD wrapped",
    "flat NO_SHARD whole",
    "orig NO_SHARD wrapped",
]
# Sums of at most four gradients near one, and moments and steps of at most three of them, round a few units of 1.1e-16.
CLOSE = 1e-13
RANK0 = (FULL, None, FullOptimStateDictConfig(rank0_only=True))


@pytest.mark.world([2, 3])
@pytest.mark.parametrize("api", APIS)
@pytest.mark.covers("OSD-01", "OSD-02", "OSD-04", "OSD-05", "OSD-22", "OSD-24", "OSD-25", "COMP-13", "B083")
def test_state_is_that_of_one_process(optim_lab, api):
    want = optim_lab.named(*optim_lab.plain())
    for layout in ("FULL_SHARD wrapped", "NO_SHARD whole"):
        model, optim = optim_lab.trained(f"{api} {layout}")
        saved = optim_state_dict(model, optim)
        optim_lab.same(saved, want, CLOSE)
        assert list(saved["state"]) == list(model.state_dict()) == list(optim_lab.net().state_dict())
        values = [value for state in saved["state"].values() for value in state.values()]
        assert len({value.untyped_storage().data_ptr() for value in values}) == len(values)
        kept = copy.deepcopy(saved)
        for param in model.parameters():
            if not param.numel():  # what a rank without elements says of steps is not listened to
                optim.state[param] = {"step": torch.tensor(9.0)}
        optim_lab.same(optim_state_dict(model, optim), kept)
        optim_lab.step(model, optim, 2)
        optim_lab.same(saved, kept)


@pytest.mark.world([2, 3])
@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.covers("OSD-06", "OSD-07", "OSD-08", "OSD-09", "OSD-10", "OSD-20", "OSD-24", "B102")
def test_every_layout_loads_what_another_saved(optim_lab, source):
    model, optim = optim_lab.trained(source)
    weights, saved = model.state_dict(), optim_state_dict(model, optim)
    with state_dict_type(model, SHARDED):
        pieces = optim_state_dict(model, optim)
    with state_dict_type(model, *RANK0):
        on_first = optim_state_dict(model, optim)
    assert bool(on_first) == (optim_lab.rank == 0)
    optim_lab.step(model, optim, 2)
    for target in LAYOUTS:
        loaded = optim_lab.shard(target, optim_lab.net())
        other = optim_lab.adamw(loaded.parameters(), lr=1.0)
        for form, state in ((FULL,), saved), ((SHARDED,), pieces), (RANK0, on_first or None):
            other.load_state_dict(optim_lab.adamw(loaded.parameters()).state_dict())
            with state_dict_type(loaded, *form):
                mine = optim_state_dict_to_load(loaded, other, state, load_directly=True)
            assert all(mine["state"].values())  # nothing for what this rank has no element of
            for entries in mine["state"].values():
                for value in entries.values():
                    assert value.untyped_storage().nbytes() == value.nbytes
            optim_lab.same(optim_state_dict(loaded, other), saved)
        loaded.load_state_dict(weights)
        optim_lab.step(loaded, other, 2)
        # Two addends commute; the all-reduce of NO_SHARD adds three in an order of its own.
        bound = CLOSE if optim_lab.size > 2 and "NO_SHARD" in target + source else 0.0
        optim_lab.same(dict(loaded.state_dict()), dict(model.state_dict()), bound)
        optim_lab.same(optim_state_dict(loaded, other), optim_state_dict(model, optim), bound)


@pytest.mark.world(3)
@pytest.mark.covers("OSD-06")
def test_sharded_state_is_cut_along_the_first_dimension(optim_lab):
    model, optim = optim_lab.trained("orig FULL_SHARD wrapped")
    whole = optim_state_dict(model, optim)["state"]
    for form in SHARDED, LOCAL:
        with state_dict_type(model, form):
            saved = optim_state_dict(model, optim)["state"]
        for name, entries in saved.items():
            assert not isinstance(entries["step"], DTensor)
            value, want = entries["exp_avg"], whole[name]["exp_avg"]
            if want.ndim:
                rows = want.chunk(optim_lab.size)[optim_lab.rank :][:1]
                assert torch.equal(value.to_local(), rows[0] if rows else want[:0])
                assert torch.equal(value.full_tensor(), want)
            assert value.shape == want.shape
    with state_dict_type(model, SHARDED, None, ShardedOptimStateDictConfig(offload_to_cpu=False)):
        assert optim_state_dict(model, optim)["state"]["0.bias"]["exp_avg"].device.type == "cpu"


def elementwise_step(optim):
    """Step with gradients that depend on each element alone, so that no layout rounds otherwise than another."""
    for group in optim.param_groups:
        for param in group["params"]:
            param.grad = param.detach() * 0.5 + 0.25 if param.numel() else None
    optim.step()


@pytest.mark.world(3)
@pytest.mark.parametrize(("before", "after"), [((1, 2), (0, 1, 2)), ((0, 1, 2), (1, 2))])
@pytest.mark.covers("OSD-20", "OSD-09", "OSD-13")
def test_another_number_of_ranks_goes_on_as_one_process(optim_lab, world, before, after):
    groups = {ranks: dist.new_group(list(ranks)) if len(ranks) < 3 else dist.group.WORLD for ranks in (before, after)}
    saved = None
    if world.rank in before:
        model = optim_lab.shard("orig FULL_SHARD wrapped", optim_lab.net(), process_group=groups[before])
        optim = optim_lab.adamw(model.parameters())
        for _ in range(2):
            elementwise_step(optim)
        with state_dict_type(model, *RANK0):
            saved = optim_state_dict(model, optim) or None
        weights = model.state_dict()
        assert (saved is not None) == (world.rank == before[0])
    everyones = world.all_gather_object((saved, weights if saved else None))
    (saved, weights), *none = [each for each in everyones if each[0]]
    assert not none
    plain = optim_lab.net()
    plain_optim = optim_lab.adamw(plain.parameters())
    for _ in range(3):
        elementwise_step(plain_optim)
    if world.rank in after:
        for layout in ("flat FULL_SHARD whole", "composable FULL_SHARD wrapped"):
            model = optim_lab.shard(layout, optim_lab.net(), process_group=groups[after])
            model.load_state_dict(weights)
            optim = optim_lab.adamw(model.parameters(), lr=1.0)
            with state_dict_type(model, *RANK0):
                mine = saved if world.rank == after[0] else {"nothing": "of use"}
                optim_state_dict_to_load(model, optim, mine, load_directly=True)
            optim_lab.same(optim_state_dict(model, optim), saved)
            elementwise_step(optim)
            optim_lab.same(dict(model.state_dict()), dict(plain.state_dict()))
            optim_lab.same(optim_state_dict(model, optim), dict(optim_lab.named(plain, plain_optim)))
    world.barrier()
    for group in set(groups.values()) - {dist.group.WORLD}:
        if world.rank in dist.get_process_group_ranks(group):
            dist.destroy_process_group(group)


@pytest.mark.world(4)
@pytest.mark.covers("OSD-06", "OSD-09", "B098")
def test_hybrid_units_save_and_load_within_their_groups(optim_lab, mesh_of, watch_collectives):
    want = optim_lab.named(*optim_lab.plain())
    with mesh_of(2, 2) as mesh:
        model, optim = optim_lab.trained("orig HYBRID_SHARD wrapped", device_mesh=mesh)
        with watch_collectives() as calls:
            optim_lab.same(optim_state_dict(model, optim), want, CLOSE)
        assert {call.group for call in calls} == {mesh.get_group(1)}
        with state_dict_type(model, SHARDED):
            pieces = optim_state_dict(model, optim)
            kept = optim_state_dict_to_load(model, optim, pieces)
        for form in (RANK0,):
            with state_dict_type(model, *form):
                saved = optim_state_dict(model, optim)
                assert bool(saved) == (optim_lab.rank == 0)
                optim_lab.same(optim_state_dict_to_load(model, optim, saved or None), kept)


@pytest.mark.world(2)
@pytest.mark.covers("OSD-02", "OSD-03", "OSD-13", "OSD-24")
def test_groups_inside_a_flat_parameter_in_an_order_of_each_rank(optim_lab):
    """Some are not optimized; a rank leaves out what it has no element of, and numbers its groups otherwise."""

    def grouped(model, rank=0):
        named = [(n, p) for n, p in model.named_parameters() if "gain" not in n]
        biases = [p for n, p in named if n.endswith("bias") and p.numel()]
        others = [p for n, p in named if not n.endswith("bias") and p.numel()]
        groups = [{"params": biases, "weight_decay": 0.2, "initial_lr": 0.05}, {"params": others, "lr": 0.02}]
        return optim_lab.adamw(groups[::-1] if rank else groups)

    for layout in ("orig FULL_SHARD wrapped", "composable FULL_SHARD whole"):
        model, optim = optim_lab.trained(layout, make=lambda params: torch.optim.SGD(params, lr=0.0))
        optim = grouped(model, optim_lab.rank)
        plain = optim_lab.net()
        plain_optim = grouped(plain)
        for step in range(2):
            optim_lab.step(model, optim, step)
            optim_lab.plain_step(plain, plain_optim, step)
        saved = optim_state_dict(model, optim)
        want = optim_lab.named(plain, plain_optim)
        optim_lab.same(saved["state"], want["state"], CLOSE)
        for group, wanted in zip(
            saved["param_groups"][:: -1 if optim_lab.rank else 1], want["param_groups"], strict=True
        ):
            assert sorted(group.pop("params")) == sorted(wanted.pop("params"))
            assert group == wanted
        again = grouped(model, optim_lab.rank)
        again.param_groups[0]["lr"] = 9.0
        saved = optim_state_dict(model, optim)
        optim_state_dict_to_load(model, again, saved, load_directly=True)
        optim_lab.same(optim_state_dict(model, again), saved)
        optim_lab.step(model, again, 2)
        optim_lab.plain_step(plain, plain_optim, 2)
        optim_lab.same(dict(model.state_dict()), dict(plain.state_dict()), CLOSE)


@pytest.mark.world(2)
@pytest.mark.parametrize("api", APIS)
@pytest.mark.covers("OSD-16", "OSD-11", "OSD-10")
def test_saving_before_the_first_step_changes_nothing(optim_lab, api):
    """Nor does it for an optimizer without state; an explicit dictionary is taken as it is."""
    plain, plain_optim = optim_lab.plain(steps=1)
    for make in (optim_lab.adamw, lambda params: torch.optim.SGD(params, lr=0.1)):
        model = optim_lab.shard(f"{api} FULL_SHARD wrapped", optim_lab.net())
        optim = make(model.parameters())
        saved = optim_state_dict(model, optim)
        assert saved["state"] == {}
        assert sorted(saved["param_groups"][0]["params"]) == sorted(plain.state_dict())
        assert not optim.state
        optim_state_dict_to_load(model, optim, saved, load_directly=True)
        assert list(optim_state_dict(model, optim, {"state": {}})) == ["state"]
        optim_lab.step(model, optim, 0)
        if make is optim_lab.adamw:
            optim_lab.same(dict(model.state_dict()), dict(plain.state_dict()), CLOSE)
            optim_lab.same(optim_state_dict(model, optim), optim_lab.named(plain, plain_optim), CLOSE)


@pytest.mark.world(2)
@pytest.mark.parametrize("api", APIS)
@pytest.mark.covers("OSD-03", "OSD-23", "B101")
def test_entries_of_other_kinds_survive(optim_lab, api):
    model, optim = optim_lab.trained(f"{api} FULL_SHARD wrapped")
    for state in optim.state.values():
        state |= {"none": None, "word": "x", "history": torch.arange(3.0)[None], "step": state["step"].reshape(1)}
        state["nested"] = {"deep": [1, 2]}
    given = optim.state_dict()
    given["state"]["mine"] = torch.ones(2)
    given["extra"] = 7
    with pytest.warns(UserWarning, match="mine, which belong to none"):
        saved = optim_state_dict(model, optim, given)
    assert saved["extra"] == 7
    one = saved["state"]["1.b.weight"]
    assert (one["none"], one["word"], one["nested"]) == (None, "x", {"deep": [1, 2]})
    assert torch.equal(one["history"], torch.arange(3.0)[None])
    kept = {name: entries for name, entries in saved["state"].items() if name != "mine"}
    assert all(torch.equal(entries["step"], torch.tensor([2.0])) for entries in kept.values())
    for form, state in ((FULL,), saved), (RANK0, saved if optim_lab.rank == 0 else None):
        with state_dict_type(model, *form), pytest.warns(UserWarning, match="mine"):
            loaded = optim_state_dict_to_load(model, optim, state)
        assert loaded["extra"] == 7
        assert torch.equal(loaded["state"].pop("mine"), torch.ones(2))
        again = optim_state_dict(model, optim, loaded)  # torch's own loading makes a generator of the word
        optim_lab.same(again["state"], kept)


@pytest.mark.world(2)
@pytest.mark.parametrize("api", APIS)
@pytest.mark.covers("OSD-23")
def test_optimizers_whose_state_is_keyed_by_names(optim_lab, api):
    model, optim = optim_lab.trained(f"{api} FULL_SHARD wrapped")
    names = {id(param): name for name, param in model.named_parameters()}
    called = [names[id(param)] for group in optim.param_groups for param in group["params"]]
    own = optim.state_dict()
    named = {"state": {called[key]: state for key, state in own["state"].items()}}
    named["param_groups"] = [{**group, "params": sorted(called)} for group in own["param_groups"]]
    saved = optim_state_dict(model, optim)
    optim_lab.same(optim_state_dict(model, optim, named)["state"], saved["state"])
    loaded = optim_state_dict_to_load(model, optim, saved, is_named_optimizer=True)
    assert set(loaded["state"]) == set(named["state"])
    assert sorted(loaded["param_groups"][0]["params"]) == sorted(called)
    for name, state in named["state"].items():
        optim_lab.same(loaded["state"][name], dict(state))


class HighPrecision(torch.optim.Optimizer):
    """Keeps a moment in single precision for parameters in half precision, and loads it so."""

    def __init__(self, params, lr=0.5):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for param in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[param]
            moment = state.setdefault("moment", torch.zeros(param.shape, dtype=torch.float32))
            moment.mul_(0.9).add_(param.grad.float(), alpha=0.1234567)
            param.add_(moment.to(param.dtype), alpha=-self.param_groups[0]["lr"])

    def load_state_dict(self, state_dict):
        params = [param for group in self.param_groups for param in group["params"]]
        self.state.clear()
        self.state.update({params[key]: dict(state) for key, state in state_dict["state"].items()})


@pytest.mark.world(2)
@pytest.mark.parametrize("api", APIS)
@pytest.mark.covers("OSD-08")
def test_moments_in_another_dtype_than_the_parameters(optim_lab, api):
    model = optim_lab.shard(f"{api} FULL_SHARD wrapped", optim_lab.net().bfloat16())
    optim = HighPrecision(model.parameters())
    for step in range(2):
        optim_lab.step(model, optim, step)
    saved = optim_state_dict(model, optim)
    moment = saved["state"]["1.a.weight"]["moment"]
    assert moment.dtype == torch.float32
    assert not torch.equal(moment, moment.bfloat16().float())
    other = optim_lab.shard(f"{'orig' if api == 'flat' else 'flat'} FULL_SHARD whole", optim_lab.net().bfloat16())
    other.load_state_dict(model.state_dict())
    loaded = HighPrecision(other.parameters())
    optim_state_dict_to_load(other, loaded, saved, load_directly=True)
    optim_lab.same(optim_state_dict(other, loaded), saved)
    optim_lab.step(model, optim, 2)
    optim_lab.step(other, loaded, 2)
    optim_lab.same(dict(other.state_dict()), dict(model.state_dict()))


@pytest.mark.world(2)
@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}])
@pytest.mark.covers("OSD-03")
def test_kinds_of_steps(optim_lab, options):
    def make(params):
        return optim_lab.adamw(params, amsgrad=True, **options)

    for layout in ("orig FULL_SHARD wrapped", "flat FULL_SHARD whole"):
        model, optim = optim_lab.trained(layout, make=make)
        saved = optim_state_dict(model, optim)
        optim_lab.same(saved, optim_lab.named(*optim_lab.plain(make=make)), CLOSE)
        again = make(model.parameters())
        optim_state_dict_to_load(model, again, saved, load_directly=True)
        optim_lab.same(optim_state_dict(model, again), saved)


class Tied(nn.Module):
    """A tied weight, a frozen layer, an ignored one, an empty parameter, and one that is not stored row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(5, 5, bias=False)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.two = nn.Linear(5, 5)
        self.two.weight = self.one.weight
        self.ignored = nn.Linear(5, 5)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.grid = nn.Parameter(torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last))

    def forward(self, x):
        return self.ignored(self.two(torch.tanh(self.frozen(self.one(x))))) + self.empty.sum() + (self.grid**2).sum()


@pytest.mark.world([2, 3])
@pytest.mark.covers("OSD-15", "OSD-25", "B158")
def test_tied_frozen_ignored_and_empty_parameters(optim_lab):
    torch.manual_seed(0)
    plain = Tied().double()
    model = copy.deepcopy(plain)
    fsdp_ref.fully_shard(model, ignored_modules=[model.ignored])
    optim, plain_optim = optim_lab.adamw(model.parameters()), optim_lab.adamw(plain.parameters())
    for step in range(2):
        # The same inputs on all ranks: nobody averages the gradients of what is ignored.
        for one, its in ((model, optim), (plain, plain_optim)):
            its.zero_grad()
            one(optim_lab.inputs(step)[0]).pow(2).mean().backward()
            its.step()
        if step == 0:
            saved = optim_state_dict(model, optim)
            optim_lab.same(saved, optim_lab.named(plain, plain_optim), CLOSE)
            assert "frozen.weight" not in saved["state"]
            assert "two.weight" not in saved["state"]
            for frozen in (model.frozen, plain.frozen):
                frozen.requires_grad_(True)  # thawed after saving: it had no state
            scheduler = torch.optim.lr_scheduler.StepLR(optim, 1)
            optim_state_dict_to_load(model, optim, saved, load_directly=True)
            assert "initial_lr" in optim.param_groups[0]
            assert scheduler.get_last_lr() == [0.05]
            # A file of another tool may call the tied weight by its other name.
            saved["state"]["two.weight"] = saved["state"].pop("one.weight")
            optim_state_dict_to_load(model, optim, saved, load_directly=True)
            del optim.param_groups[0]["initial_lr"]
    optim_lab.same(optim_state_dict(model, optim), optim_lab.named(plain, plain_optim), CLOSE)
    optim_lab.same(dict(model.state_dict()), dict(plain.state_dict()), CLOSE)


@pytest.mark.world(2)
@pytest.mark.parametrize(("form", "gathers"), [(FULL, 6), (SHARDED, 0)])
@pytest.mark.covers("OSD-04")
def test_one_unit_at_a_time_is_whole(optim_lab, form, gathers, monkeypatch):
    """What is gathered for one entry of one unit is given up before the next is gathered; by rows none is whole."""
    model, optim = optim_lab.trained("orig FULL_SHARD wrapped")
    gathered, gather_into = [], FlatHandle.gather_into
    views = []

    def watched(handle, full_F, part_S):
        assert not [view for view in views if view() is not None]
        gather_into(handle, full_F, part_S)
        gathered.append(handle.name)

    def noted(flat, layout):
        made = flat_views(flat, layout)
        views.extend(map(weakref.ref, made))
        return made

    monkeypatch.setattr(FlatHandle, "gather_into", watched)
    monkeypatch.setattr(optim_save, "flat_views", noted)
    with state_dict_type(model, form):
        saved = optim_state_dict(model, optim)
    # Two moments of each of three units.
    assert len(gathered) == gathers
    assert len(views) == (2 * len(saved["state"]) if gathers else 0)


@pytest.mark.world(2)
@pytest.mark.covers("OSD-17", "OSD-18")
def test_older_functions_are_other_words_for_the_two(optim_lab):
    fsdp = FullyShardedDataParallel
    model, optim = optim_lab.trained("orig FULL_SHARD wrapped")
    saved = optim_state_dict(model, optim)
    with pytest.warns(FutureWarning, match="full_optim_state_dict.* being deprecated"):
        whole = fsdp.full_optim_state_dict(model, optim)
    optim_lab.same(whole, saved if optim_lab.rank == 0 else {})
    with pytest.warns(FutureWarning, match="sharded_optim_state_dict.* being deprecated"):
        pieces = fsdp.sharded_optim_state_dict(model, optim)
    assert isinstance(pieces["state"]["0.bias"]["exp_avg"], DTensor)
    want = optim_state_dict_to_load(model, optim, saved)
    with pytest.warns(FutureWarning, match="shard_full_optim_state_dict.* being deprecated"):
        optim_lab.same(fsdp.shard_full_optim_state_dict(saved, model, optim=optim), want)
    with pytest.warns(FutureWarning) as caught:
        optim_lab.same(fsdp.shard_full_optim_state_dict(saved, model, list(model.parameters())), want)
    assert "`optim_input` argument is deprecated" in str(caught[1].message)
    with pytest.warns(FutureWarning, match="flatten_sharded_optim_state_dict.* being deprecated"):
        optim_lab.same(fsdp.flatten_sharded_optim_state_dict(pieces, model, optim), want)
    with pytest.warns(FutureWarning, match="scatter_full_optim_state_dict.* being deprecated"):
        optim_lab.same(fsdp.scatter_full_optim_state_dict(whole or None, model), want)
    with pytest.warns(FutureWarning), pytest.raises(TypeError, match="optim_input: expected an iterable of parameters"):
        fsdp.scatter_full_optim_state_dict(whole or None, model, optim_input=3)
    with pytest.warns(FutureWarning), pytest.raises(ValueError, match="should not be empty"):
        fsdp.scatter_full_optim_state_dict(whole or None, model, optim_input=[])


@pytest.mark.world(2)
def test_state_in_the_shapes_of_rows_and_columns_is_loaded_where_parameters_are_whole(optim_lab):
    model = optim_lab.shard("orig NO_SHARD wrapped", optim_lab.net())
    optim, other = (torch.optim.Adafactor(model.parameters(), lr=0.1) for _ in range(2))
    optim_lab.step(model, optim, 0)
    saved = optim_state_dict(model, optim)
    assert {"row_var", "col_var"} <= saved["state"]["1.a.weight"].keys()
    other.load_state_dict(optim_state_dict_to_load(model, other, saved))
    optim_lab.same(optim_state_dict(model, other), saved)
