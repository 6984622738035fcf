"""Model state in the forms that no rank has whole, and the full one that rank 0 has alone."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp_ref import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    fully_shard,
    get_state_dict_type,
    no_sync,
    set_state_dict_type,
    state_dict_type,
)
from fsdp_ref.annotations import units_in
from fsdp_ref.states import UnitState

FULL, LOCAL, SHARDED = StateDictType


class Odd(nn.Module):
    """What chunks find hard: a scalar, nothing, one row, rows in another order in memory; and what nobody shards."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.row = nn.Parameter(torch.randn(1, 7))
        self.turned = nn.Parameter(torch.randn(3, 5).t())
        self.images = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
        self.left = nn.Linear(2, 3)
        self.register_buffer("count", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("passing", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scalar + self.row.sum() + self.turned.sum() + self.images.sum() + self.left.weight.sum()


def net(lab, *, checkpointed=False):
    """A net with odd parameters in a unit below, one of them tied to a place of the root's."""
    model = lab.make()
    torch.manual_seed(5)
    model.odd = Odd().double()
    model.tied = nn.Linear(5, 3, bias=False).double()
    model.tied.weight = model.inp.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.float64))
    if checkpointed:
        model.blocks[1] = checkpoint_wrapper(model.blocks[1])
    return model


def shard(lab, path, model, *, nested=True, **options):
    return lab.shard(
        model, path, policy={lab.Block, Odd} if nested else None, ignored_modules=[model.odd.left], **options
    )


def zeroed(model):
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    return model


def full_state(model):
    with state_dict_type(model, FULL):
        return {name: value.clone() for name, value in model.state_dict().items()}


def assert_equal(got, want):
    assert list(got) == list(want)
    for name, value in want.items():
        assert torch.equal(got[name], value), name
        assert got[name].dtype == value.dtype, name


# -------------------------------------------------------------------------------------------------------------- sharded


@pytest.mark.world([2, 3])
@pytest.mark.covers("SD-05", "SD-10", "SD-11", "SD-12", "SD-13", "SD-17", "SD-18", "SD-19", "SD-20", "SD-22", "SD-26")
def test_sharded(lab, path):
    plain = net(lab)
    want = plain.state_dict()
    model = shard(lab, path, net(lab, checkpointed=True))
    lab.loss(model, lab.batch()).backward()  # a state with gradients and after lazy initialization
    set_state_dict_type(model, SHARDED)
    state = model.state_dict()
    assert list(state) == list(want)
    left = {name for name in state if "left" in name or "count" in name or "scale" in name}
    assert {name for name, value in state.items() if not isinstance(value, DTensor)} == left
    size, rank = lab.world.size, lab.world.rank
    for name in set(state) - left:
        chunks = want[name].chunk(size) if want[name].dim() else [want[name]] * size
        mine = chunks[rank] if rank < len(chunks) else want[name][:0]
        assert torch.equal(state[name].to_local(), mine), name
        assert state[name].shape == want[name].shape
        assert state[name].to_local().untyped_storage().nbytes() == mine.nbytes, "a view keeps the whole unit alive"
    whole = {name: value.full_tensor() if name not in left else value for name, value in state.items()}
    assert_equal(whole, want)
    zeroed(net(lab)).load_state_dict(whole)
    assert state["tied.weight"] is state["inp.weight"]
    assert state["odd.left.weight"].data_ptr() == lab.units(model)[0].module.odd.left.weight.data_ptr()
    assert all(unit.state is UnitState.SHARDED for unit in units_in(model))
    part = model.odd.state_dict(prefix="at.")
    assert torch.equal(part["at.row"].full_tensor(), want["odd.row"])
    for nested in (True, False):  # loaded by the same units, and by one
        other = shard(lab, path, zeroed(net(lab)), nested=nested)
        with state_dict_type(other, SHARDED):
            other.load_state_dict(state)
            few = {name: value for name, value in state.items() if name != "blocks.0.lin1.weight"}
            with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "blocks.0.lin1.weight"'):
                other.load_state_dict(few)
            report = other.load_state_dict({**few, "blocks.1.extra": state["odd.row"]}, strict=False)
            assert report.missing_keys == ["blocks.0.lin1.weight"]
            assert report.unexpected_keys == ["blocks.1.extra"]
            wrong = {**state, "odd.row": state["inp.weight"], "out.weight": state["odd.row"]}
            with pytest.raises(RuntimeError, match=r"size mismatch for (?s:.*)size mismatch for"):
                other.load_state_dict(wrong)
        assert_equal(full_state(other), want)
        lab.loss(other, lab.batch()).backward()
    with pytest.raises(
        RuntimeError, match="blocks.0.lin1.weight: expected a whole tensor, since FULL_STATE_DICT is set"
    ):
        other.load_state_dict(state)


@pytest.mark.world(2)
@pytest.mark.covers("SD-12")
def test_ranks_that_load_different_entries_raise_before_any_of_them_waits(lab, path):
    model = shard(lab, path, net(lab))
    set_state_dict_type(model, SHARDED)
    state = model.state_dict()
    if lab.world.rank == 1:
        del state["blocks.2.lin1.bias"]
    with pytest.raises(RuntimeError, match=r"same sharded entries .* got rank 0: blocks.2.lin1.bias: \(5,\)"):
        model.load_state_dict(state)
    theirs = lab.world.all_gather_object({name: v for name, v in model.state_dict().items() if "out" in name})[
        lab.world.rank - 1
    ]
    with pytest.raises(RuntimeError, match=r"rank 0: out.weight: .*, the chunk of rank 1, rank 1: out.weight"):
        model.load_state_dict(theirs, strict=False)
    assert_equal(full_state(model), net(lab).state_dict())
    lab.loss(model, lab.batch()).backward()


# ---------------------------------------------------------------------------------------------------------------- local


@pytest.mark.world([2, 3])
@pytest.mark.covers("SD-07", "SD-08", "SD-10", "SD-22", "SD-24")
def test_local(lab, path):
    want = net(lab).state_dict()
    model = shard(lab, path, net(lab, checkpointed=True))
    set_state_dict_type(model, LOCAL)
    with lab.collectives() as seen:
        state = model.state_dict()
    assert seen == []
    shards = {name: value for name, value in state.items() if isinstance(value, DTensor)}
    assert set(shards) == {*(f"blocks.{i}._flat_param" for i in range(3)), "odd._flat_param", "_flat_param"}
    assert set(state) - set(shards) == {name for name in want if "left" in name or "count" in name or "scale" in name}
    for unit in lab.units(model):
        handle = unit.handle
        value = shards[f"{unit.name}._flat_param" if unit.name else "_flat_param"]
        span = handle.shard_map.shard_span(handle.shard_rank)
        assert value.shape == (handle.layout.numel,)
        assert torch.equal(value.to_local(), handle.shard_S[: span.numel])
        assert value.to_local().data_ptr() != handle.shard_S.data_ptr()
    file = io.BytesIO()
    torch.save(copy.deepcopy(state), file)
    file.seek(0)
    other = shard(lab, path, zeroed(net(lab)))
    lab.loss(other, lab.batch()).backward()
    held = [param for name, param in other.named_parameters() if "left" not in name]
    with state_dict_type(other, LOCAL):
        other.load_state_dict(torch.load(file, weights_only=True), assign=True)
        now = [param for name, param in other.named_parameters() if "left" not in name]
        assert all(a is b for a, b in zip(now, held, strict=True))
        few = {name: value for name, value in state.items() if name != "blocks.0._flat_param"}
        assert other.load_state_dict(few, strict=False).missing_keys == ["blocks.0._flat_param"]
        other.load_state_dict(state)
    assert_equal(full_state(other), want)
    lab.loss(other, lab.batch()).backward()
    part = shard(lab, path, zeroed(net(lab)))
    with state_dict_type(part, LOCAL):
        blocks = part.blocks
        blocks.load_state_dict({name.removeprefix("blocks."): v for name, v in state.items() if "blocks" in name})
    assert torch.equal(full_state(part)["blocks.1.lin1.weight"], want["blocks.1.lin1.weight"])
    assert full_state(part)["inp.weight"].count_nonzero() == 0
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: .*"odd._flat_param"'):
        part.load_state_dict(state)


@pytest.mark.world(2)
@pytest.mark.covers("SD-07", "SD-13")
def test_local_states_that_do_not_fit(lab, path):
    """All that does not is named at once."""
    want = net(lab).state_dict()
    model = shard(lab, path, net(lab))
    set_state_dict_type(model, LOCAL)
    state = model.state_dict()
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: .*"inp.weight"'):
        model.load_state_dict({**state, **want})
    with pytest.raises(RuntimeError, match=r"\t_flat_param: expected (?s:.*)\todd._flat_param: expected"):
        model.load_state_dict({**state, "odd._flat_param": state["_flat_param"], "_flat_param": torch.ones(3)})
    theirs = lab.world.all_gather_object(state)[lab.world.rank - 1]
    other_rank = (lab.world.rank - 1) % lab.world.size
    with pytest.raises(
        RuntimeError, match=rf"saved by rank {lab.world.rank} of \d, got .*, saved by rank {other_rank} of"
    ):
        model.load_state_dict(theirs)
    with pytest.raises(NotImplementedError, match="a module with whole units"):
        model.inp.state_dict()
    model.load_state_dict(state)
    assert_equal(full_state(model), want)


@pytest.mark.covers("SD-07")
def test_a_local_state_of_another_number_of_ranks_is_refused(worlds, tmp_path):
    # 5 elements are three chunks of two on three ranks, and on four ranks too.
    worlds(size=4).run(save_local, str(tmp_path))
    for rank, message in enumerate(worlds(size=3).run(load_local, str(tmp_path))):
        assert f"saved by rank {rank} of 3, got 2 of 5 elements of torch.float32, saved by rank 0 of 4" in message


def five():
    import fsdp_ref

    model = fsdp_ref.FullyShardedDataParallel(nn.Linear(5, 1, bias=False))
    set_state_dict_type(model, LOCAL)
    return model


def save_local(folder):
    torch.save(five().state_dict(), f"{folder}/{dist.get_rank()}.pt")


def load_local(folder):
    try:
        five().load_state_dict(torch.load(f"{folder}/0.pt", weights_only=True))
    except RuntimeError as error:
        return str(error)
    return "loaded"


# ------------------------------------------------------------------------------------------------------ full, by options


@pytest.mark.world(2)
@pytest.mark.covers("SD-03", "SD-04", "SD-19")
def test_rank_zero_alone_has_it(lab, path):
    """Below a unit; what no unit has every rank returns."""
    want = net(lab).state_dict()
    model = shard(lab, path, net(lab))
    top = nn.Sequential(model, nn.Linear(2, 2))
    first = lab.world.rank == 0
    with state_dict_type(top, FULL, FullStateDictConfig(offload_to_cpu=True, rank0_only=True)):
        state, own, part = top.state_dict(), model.state_dict(), model.inp.state_dict()
    assert set(state) == ({f"0.{name}" for name in want} if first else set()) | {"1.weight", "1.bias"}
    assert set(part) == ({"weight", "bias"} if first else set())
    assert_equal(own, want if first else {})
    for name, value in own.items():
        assert torch.equal(state[f"0.{name}"], value)
        assert value.device.type == "cpu"
    assert not first or own["inp.weight"].untyped_storage().nbytes() == 12 * 8
    assert_equal(full_state(model), want)


# ------------------------------------------------------------------------------------------------------ strategies, meshes


@pytest.mark.world(2)
@pytest.mark.covers("SD-09")
@pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy:FutureWarning")
@pytest.mark.parametrize("form", [LOCAL, SHARDED], ids=lambda form: form.name)
def test_what_is_not_sharded_is_saved_whole(lab, path, form):
    model = shard(lab, path, net(lab), sharding_strategy=ShardingStrategy.NO_SHARD)
    want = net(lab).state_dict()
    set_state_dict_type(model, form)
    with pytest.warns(UserWarning, match="full_state_dict will be returned"):
        state = model.state_dict()
    assert_equal(state, want)
    model.load_state_dict({name: value + 1 for name, value in state.items()})
    assert_equal(full_state(model), {name: value + 1 for name, value in want.items()})
    sharded = shard(lab, path, net(lab))
    if form is SHARDED:
        with state_dict_type(sharded, form):
            model.load_state_dict(sharded.state_dict())
        assert_equal(full_state(model), want)


@pytest.mark.world(2)
@pytest.mark.covers("COMP-12", "SD-08", "SD-09")
@pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy:FutureWarning")
def test_a_tree_of_both_apis_each_unit_in_its_own_form(lab):
    def tree(seed=0):
        model = lab.make(seed=seed)
        fully_shard(model.blocks[0], strategy=ShardingStrategy.NO_SHARD)
        model.blocks[1] = lab.shard(model.blocks[1], "flat")
        model.blocks[2] = lab.shard(model.blocks[2], "wrapper")
        FullyShardedDataParallel.set_state_dict_type(model, SHARDED)
        FullyShardedDataParallel.set_state_dict_type(model.blocks[2], LOCAL)
        return model

    want = lab.make().state_dict()
    with pytest.warns(UserWarning, match="full_state_dict will be returned"):
        state = tree().state_dict()
    sharded = {name for name, value in state.items() if isinstance(value, DTensor)}
    assert sharded == {name for name in want if "blocks.1.lin" in name} | {"blocks.2._flat_param"}
    assert set(state) - sharded == {name for name in want if not name.startswith(("blocks.1.lin", "blocks.2.lin"))}
    assert all(torch.equal(state[name], want[name]) for name in set(state) - sharded)
    other = tree(seed=1)
    other.load_state_dict(state)
    assert FullyShardedDataParallel.get_state_dict_type(other.blocks[2]).state_dict_type is LOCAL
    assert_equal(full_state(other), want)


@pytest.mark.world(4)
@pytest.mark.covers("SD-06", "SD-05")
def test_hybrid(lab, path):
    """Over a mesh, whose axes entries keep; over a pair of groups; local too, which torch refuses with a mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    want = net(lab).state_dict()
    for given in ({"device_mesh": mesh}, {"process_group": (mesh.get_group(1), mesh.get_group(0))}):
        options = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, **given}
        model = shard(lab, path, net(lab), **options)
        with state_dict_type(model, SHARDED, ShardedStateDictConfig(offload_to_cpu=True)):
            state = model.state_dict()
        names = ("replicate", "shard") if "device_mesh" in given else None
        assert state["inp.weight"].device_mesh.mesh_dim_names == names
        assert state["inp.weight"].to_local().shape == (2, 3)
        assert torch.equal(state["inp.weight"].full_tensor(), want["inp.weight"])
        with state_dict_type(model, LOCAL):
            local = model.state_dict()
        for form, each in ((SHARDED, state), (LOCAL, local)):
            other = shard(lab, path, zeroed(net(lab)), **options)
            with state_dict_type(other, form):
                other.load_state_dict(each)
            assert_equal(full_state(other), want)
        with state_dict_type(model, FULL, FullStateDictConfig(rank0_only=True)):
            assert bool(model.state_dict()) == (lab.world.rank == 0)
    for group in (mesh.get_group(0), mesh.get_group(1)):
        dist.destroy_process_group(group)


# --------------------------------------------------------------------------------------------------------------- moments


class Calls(torch.autograd.Function):
    """Calls something in backward."""

    @staticmethod
    def forward(ctx, x, call):
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.call()
        return grad, None


@pytest.mark.world(2)
@pytest.mark.parametrize("form", [FULL, LOCAL, SHARDED], ids=lambda form: form.name)
def test_times_at_which_nothing_is_loaded(lab, path, form):
    model = shard(lab, path, net(lab))
    set_state_dict_type(model, form)
    state = model.state_dict()
    with no_sync(model), pytest.raises(ValueError, match="inside no_sync"):
        model.load_state_dict(state)
    with lab.full(model), pytest.raises(AssertionError, match="load_state_dict .* inside summon_full_params"):
        model.load_state_dict(state)
    if form is not FULL:
        with lab.full(model), pytest.raises(AssertionError, match="state_dict .* inside summon_full_params"):
            model.state_dict()
    refused = []

    def try_both():
        for call in (model.state_dict, lambda: model.load_state_dict(state)):
            with pytest.raises(AssertionError, match="during forward/backward"):
                call()
            refused.append(call)

    hooks = [
        model.blocks[1].register_forward_pre_hook(lambda *_: try_both()),
        model.blocks[1].register_forward_hook(lambda _module, _args, out: Calls.apply(out, try_both)),
    ]
    model(lab.batch()).sum().backward()
    assert len(refused) == 4
    assert [hook.remove() for hook in hooks]
    assert_equal(full_state(model), net(lab).state_dict())
    assert get_state_dict_type(model).state_dict_type is form


@pytest.mark.world(2)
@pytest.mark.covers("SD-22")
@pytest.mark.parametrize("form", [LOCAL, SHARDED], ids=lambda form: form.name)
def test_what_was_loaded_computes_next(lab, path, form):
    """Full parameters that stayed from before loading are not computed with."""
    source, reference = shard(lab, path, lab.make(net_of(lab), seed=3)), lab.make(net_of(lab), seed=3)
    set_state_dict_type(source, form)
    state = source.state_dict()
    for moment in ("forward", "accumulated"):
        model = shard(lab, path, net(lab), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
        set_state_dict_type(model, form)
        if moment == "forward":
            model(lab.batch(9))
        else:
            with no_sync(model):
                lab.loss(model, lab.batch(9)).backward()
            model.zero_grad()
        model.load_state_dict(state)
        assert torch.equal(model(lab.batch()), reference(lab.batch()))


def net_of(lab):
    def build():
        seeded = torch.random.get_rng_state()
        model = net(lab)
        torch.random.set_rng_state(seeded)
        for param in model.parameters():
            nn.init.normal_(param) if param.numel() else None
        return model

    return build


# --------------------------------------------------------------------------------------------------------------- memory


@pytest.mark.world(2)
@pytest.mark.parametrize("form", [FULL, SHARDED], ids=lambda form: form.name)
def test_a_unit_and_those_around_it_are_full_and_no_other(lab, path, form):
    model = shard(lab, path, net(lab))
    config = FullStateDictConfig(rank0_only=True) if form is FULL else None
    set_state_dict_type(model, form, config)
    most, shown = [], []

    def count(_module, state, prefix, _metadata):
        most.append(sum(unit.state is UnitState.SUMMONED for unit in units_in(model)))
        shown.append(state.get(prefix + "weight"))

    for block in model.blocks:
        block.lin1.register_state_dict_post_hook(count)
    model.state_dict()
    assert most == [2, 2, 2]
    if form is FULL and lab.world.rank == 1:  # which only takes part in gathering
        assert all(value is None or value.dim() == 1 for value in shown)
