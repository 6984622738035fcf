"""What each strategy frees and when, and that all of them train like one process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import ShardingStrategy

S = ShardingStrategy
SHARDED = [S.FULL_SHARD, S.SHARD_GRAD_OP]
ALL = [*SHARDED, S.NO_SHARD]
quiet = pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy:FutureWarning")


def full_bytes(lab, model):
    """Bytes of full buffers that are alive now, per unit."""
    sizes = []
    for unit in lab.units(model):
        handle = unit.handle
        if not handle.empty:
            buffers = handle._buffers.values()
            sizes.append(sum(buffer.tensor.untyped_storage().nbytes() for buffer in buffers))
    return sizes


@quiet
@pytest.mark.world([2, 3])
@pytest.mark.covers("STRAT-01", "ORIG-01", "RED-01", "RED-02")
@pytest.mark.parametrize("strategy", ALL, ids=lambda s: s.name)
def test_training_equals_one_process(lab, path, strategy):
    lab.parity(path=path, policy={lab.Block}, sharding_strategy=strategy)


@pytest.mark.world(2)
@pytest.mark.covers("STRAT-02", "STRAT-10", "CTOR-23", "FLAT-23")
def test_full_shard_frees_nested_units_after_forward_and_the_root_after_backward(lab, path):
    model = lab.shard(lab.make(), path, policy={lab.Block})
    assert sum(full_bytes(lab, model)) == 0
    output = model(lab.batch())
    sizes = full_bytes(lab, model)
    assert sizes[0] > 0
    assert sum(sizes[1:]) == 0
    output.sum().backward()
    assert sum(full_bytes(lab, model)) == 0


@pytest.mark.world(2)
@pytest.mark.covers("CTOR-23", "FLAT-07", "FLAT-08", "ORIG-23")
def test_a_shard_owns_no_more_than_itself(lab, path):
    model = lab.shard(lab.make(), path, policy={lab.Block})
    for unit in lab.units(model):
        handle = unit.handle
        shards = handle.shard_map
        assert handle.shard_S.untyped_storage().nbytes() == shards.shard_numel * handle.shard_S.element_size()
        assert lab.world.all_gather_object(shards.shard_numel) == [shards.shard_numel] * lab.world.size
        assert shards.layout.numel <= shards.padded_numel == shards.shard_numel * lab.world.size
        held = sum(piece.span_in_param.numel for piece in shards.param_spans(lab.world.rank))
        total = sum(lab.world.all_gather_object(held))
        assert total == sum(spec.numel for spec in shards.layout.params)


@pytest.mark.world(2)
@pytest.mark.covers("STRAT-03", "ORD-06")
def test_shard_grad_op_keeps_all_after_forward_and_none_after_backward(lab, path):
    model = lab.shard(lab.make(), path, policy={lab.Block}, sharding_strategy=S.SHARD_GRAD_OP)
    output = model(lab.batch())
    assert all(full_bytes(lab, model))
    output.sum().backward()
    assert sum(full_bytes(lab, model)) == 0
    with torch.no_grad():
        model(lab.batch())
    assert sum(full_bytes(lab, model)) == 0


@pytest.mark.world(2)
@pytest.mark.covers("STRAT-04", "TRAV-01", "RUN-12")
def test_the_root_is_the_unit_that_ran_first(lab):
    model = lab.shard(lab.make(), policy={lab.Block})
    assert [unit.is_root for unit in lab.units(model)] == [None] * 4
    assert model.check_is_root()
    assert [unit.is_root for unit in lab.units(model)] == [True, False, False, False]
    assert FSDP.fsdp_modules(model, root_only=True) == [model]
    assert FSDP.fsdp_modules(model) == [model, *model.module.blocks]


@pytest.mark.world(2)
@pytest.mark.covers("STRAT-05", "SUM-15")
@pytest.mark.parametrize("how", ["run", "summoned"])
def test_a_unit_that_was_a_root_cannot_become_nested(lab, how):
    model = lab.shard(lab.make(), policy={lab.Block})
    block = model.module.blocks[0]
    if how == "run":
        block(lab.batch(shape=(2, 4)))
    else:
        with FSDP.summon_full_params(block):
            pass
    with pytest.raises(AssertionError, match="Non-root FSDP instance's `_is_root` should not have been set yet"):
        model(lab.batch())


@pytest.mark.world(2)
@pytest.mark.covers("STRAT-06")
def test_several_roots_under_a_plain_module(lab):
    reference = lab.make()
    model = copy.deepcopy(reference)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = lab.shard(block)
    for name in ("inp", "out"):
        setattr(model, name, lab.shard(getattr(model, name)))
    for step in range(2):
        lab.loss(model, lab.batch(step)).backward()
        lab.reference_step(reference, lab.batches(step))
    assert len(FSDP.fsdp_modules(model, root_only=True)) == 5
    lab.assert_grads(model, reference)


@pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy:FutureWarning")
@pytest.mark.world(2)
@pytest.mark.covers("STRAT-07", "COMP-11")
def test_mixed_strategies_in_one_tree(lab):
    reference = lab.make()
    model = copy.deepcopy(reference)
    model.blocks[0] = lab.shard(model.blocks[0], sharding_strategy=S.NO_SHARD)
    model.blocks[1] = lab.shard(model.blocks[1], sharding_strategy=S.SHARD_GRAD_OP)
    model = lab.shard(model)
    for step in range(2):
        lab.loss(model, lab.batch(step)).backward()
        lab.reference_step(reference, lab.batches(step))
    lab.assert_grads(model, reference)
    replicated = model.module.blocks[0].module
    assert replicated.lin1.weight.grad.shape == (5, 4)
    lab.world.assert_equal_across_ranks(replicated.lin1.weight.grad)
    assert model.module.inp.weight.grad is None or model.module.inp.weight.grad.dim() == 1


@pytest.mark.world([2, 4])
@pytest.mark.covers("STRAT-08", "FLAT-05", "FLAT-06", "RED-06", "B007")
def test_an_odd_number_of_elements(lab, path):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(3, 3, bias=False)

        def forward(self, x):
            return self.lin(x)

    model = lab.parity(Odd, path, optim=torch.optim.SGD)
    if path == "flat":
        lab.loss(model, lab.batch()).backward()
        handle = lab.units(model)[0].handle
        padding = handle.shard_map.padding(lab.world.rank)
        assert handle.flat_param.grad.numel() == handle.shard_map.shard_numel
        if padding:
            assert not handle.flat_param.grad[-padding:].any()
            assert not handle.shard_S[-padding:].any()


@quiet
@pytest.mark.world(2)
@pytest.mark.covers("B079", "FLAT-06", "ORIG-23")
@pytest.mark.parametrize("strategy", ALL, ids=lambda s: s.name)
def test_a_unit_without_a_single_element(lab, path, strategy):
    class Nothing(nn.Module):
        def __init__(self):
            super().__init__()
            self.none = nn.Parameter(torch.empty(0, 3))

        def forward(self, x):
            return x + self.none.sum()

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp, self.nothing = nn.Linear(3, 3), Nothing()

        def forward(self, x):
            return self.nothing(self.inp(x))

    lab.parity(Around, path, policy={Nothing}, sharding_strategy=strategy)


@pytest.mark.world(4)
@pytest.mark.covers("STRAT-09", "B168")
def test_units_over_different_groups(lab):
    import torch.distributed as dist

    world = lab.world
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    alone = [dist.new_group([rank]) for rank in range(4)]
    reference = lab.make()
    model = copy.deepcopy(reference)
    with pytest.warns(UserWarning, match="switching to use `NO_SHARD`"):
        model.blocks[0] = lab.shard(model.blocks[0], process_group=alone[world.rank])
    model.blocks[1] = lab.shard(model.blocks[1], process_group=pairs[world.rank // 2])
    model = lab.shard(model)
    lab.loss(model, lab.batch()).backward()
    local = copy.deepcopy(reference)
    pair = copy.deepcopy(reference)
    lab.reference_step(local, [lab.batch()])
    first = world.rank // 2 * 2
    lab.reference_step(pair, [lab.batch(rank=first), lab.batch(rank=first + 1)])
    lab.reference_step(reference, lab.batches())
    got = lab.grads(model)
    want = {
        name: (local if "blocks.0." in name else pair if "blocks.1." in name else reference).get_parameter(name).grad
        for name in got
    }
    lab.assert_same(got, want)
    for group in (*pairs, *alone):
        dist.destroy_process_group(group)


@pytest.mark.world(1)
@pytest.mark.covers("CTOR-17", "B074", "B118")
@pytest.mark.parametrize("strategy", [None, S.FULL_SHARD, S.SHARD_GRAD_OP])
def test_a_world_of_one_replicates_and_says_so(lab, strategy):
    with pytest.warns(UserWarning, match="FSDP is switching to use `NO_SHARD` instead of .* since the world size is 1"):
        model = lab.parity(sharding_strategy=strategy)
    assert model.sharding_strategy is S.NO_SHARD


@pytest.mark.filterwarnings("error")
@pytest.mark.world(1)
@pytest.mark.covers("CTOR-17")
def test_a_world_of_one_that_asks_for_replication_hears_nothing(lab, path):
    lab.parity(path=path, sharding_strategy=S.NO_SHARD)


@pytest.mark.world(2)
@pytest.mark.covers("CTOR-18")
def test_replication_on_several_ranks_is_deprecated(lab):
    with pytest.warns(FutureWarning, match="NO_SHARD"):
        lab.shard(lab.make(), sharding_strategy=S.NO_SHARD)


@pytest.mark.world(2)
@pytest.mark.covers("LIM-03", "CTOR-21")
def test_the_limiter_changes_no_number(lab):
    a = lab.params(lab.parity(policy={lab.Block}, limit_all_gathers=True))
    b = lab.params(lab.parity(policy={lab.Block}, limit_all_gathers=False))
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.world(2)
@pytest.mark.covers("LIM-01", "LIM-07", "B019")
@pytest.mark.parametrize("forward", [False, True])
def test_at_most_two_nested_units_are_unsharded_at_a_time(lab, path, forward):
    from fsdp_ref.states import UnitState

    model = lab.shard(lab.make(lambda: lab.Net(blocks=6)), path, policy={lab.Block}, forward_prefetch=forward)
    peak = 0
    with lab.events():
        from fsdp_ref.runtime.events import observe

        def count(_):
            nonlocal peak
            alive = [u for u in lab.units(model) if not u.is_root and u.handle.state is not UnitState.SHARDED]
            peak = max(peak, len(alive))

        with observe(count):
            for step in range(3):
                lab.loss(model, lab.batch(step)).backward()
    assert 1 <= peak <= 2
