"""Sharding inside groups, replication across them."""

from __future__ import annotations

import copy
from collections import Counter
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import MixedPrecision, ShardingStrategy
from fsdp_ref.composable import no_sync

S = ShardingStrategy
HYBRID = [S.HYBRID_SHARD, S._HYBRID_SHARD_ZERO2]


@contextmanager
def grid(world, shard_size):
    """(shard group, replicate group) of this rank in a grid with ``shard_size`` columns; all ranks enter."""
    made = []

    def group(ranks):
        made.append((ranks, dist.new_group(ranks)))

    for start in range(0, world.size, shard_size):
        group(list(range(start, start + shard_size)))
    for column in range(shard_size):
        group(list(range(column, world.size, shard_size)))
    rows = world.size // shard_size
    shard = next(g for ranks, g in made[:rows] if world.rank in ranks)
    replicate = next(g for ranks, g in made[rows:] if world.rank in ranks)
    try:
        yield shard, replicate
    finally:
        for ranks, g in made:
            if world.rank in ranks:
                dist.destroy_process_group(g)


@contextmanager
def mesh_of(*shape):
    """A (replicate, shard) mesh whose groups are gone afterwards; all ranks enter."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    # Replicas may not communicate in a test: one that destroyed its group could do so while the other still connects.
    dist.barrier()
    try:
        yield mesh
    finally:
        for group in {mesh.get_group(0), mesh.get_group(1)} - {dist.group.WORLD}:
            dist.destroy_process_group(group)


@pytest.mark.world(4)
@pytest.mark.covers("HYB-03", "HYB-05", "B024", "B050", "B113")
@pytest.mark.parametrize("strategy", HYBRID, ids=lambda s: s.name)
@pytest.mark.parametrize("by", ["groups", "mesh"])
def test_gradients_average_over_shards_and_replicas(lab, path, strategy, by):
    if by == "mesh":
        with mesh_of(2, 2) as mesh:
            model = lab.parity(path=path, policy={lab.Block}, sharding_strategy=strategy, device_mesh=mesh)
            groups = lab.units(model)[0].config.groups
            assert dist.get_process_group_ranks(groups.shard) == ([0, 1] if lab.world.rank < 2 else [2, 3])
            assert dist.get_process_group_ranks(groups.replicate) == [lab.world.rank % 2, lab.world.rank % 2 + 2]
    else:
        with grid(lab.world, 2) as pair:
            lab.parity(path=path, policy={lab.Block}, sharding_strategy=strategy, process_group=pair)


@pytest.mark.world([2, 4])
@pytest.mark.covers("HYB-11", "B025", "B168")
@pytest.mark.parametrize("strategy", HYBRID, ids=lambda s: s.name)
def test_a_shard_group_of_one_still_averages_over_replicas(lab, path, strategy):
    with mesh_of(lab.world.size, 1) as mesh:
        lab.parity(path=path, policy={lab.Block}, sharding_strategy=strategy, device_mesh=mesh)


def add_one(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)


@pytest.mark.world(2)
@pytest.mark.covers("SUM-03", "SUM-04", "B088", "HYB-11")
@pytest.mark.parametrize("writeback", [True, False])
def test_edits_of_a_unit_whose_shard_group_has_one_rank(lab, path, writeback):
    reference = lab.make()
    with mesh_of(2, 1) as mesh:
        model = lab.shard(copy.deepcopy(reference), path, sharding_strategy=S.HYBRID_SHARD, device_mesh=mesh)
        with lab.full(model, writeback=writeback):
            add_one(model)
        if writeback:
            add_one(reference)
        lab.assert_params(model, reference)
        torch.testing.assert_close(model(lab.batch()), reference(lab.batch()), **lab.CLOSE)


@pytest.mark.world(4)
@pytest.mark.covers("SUM-05")
@pytest.mark.parametrize("writeback", [True, False])
def test_rank_zero_of_each_shard_group_sees_full_parameters(lab, path, writeback):
    reference = lab.make()
    shapes = [tuple(p.shape) for p in reference.parameters()]
    with mesh_of(2, 2) as mesh:
        model = lab.shard(copy.deepcopy(reference), path, sharding_strategy=S.HYBRID_SHARD, device_mesh=mesh)
        with lab.full(model, rank0_only=True, writeback=writeback):
            assert ([tuple(p.shape) for p in model.parameters()] == shapes) is (lab.world.rank in (0, 2))
            if lab.world.rank == 0:
                add_one(model)
        if writeback:
            add_one(reference)
        lab.assert_params(model, reference)


@pytest.mark.world(2)
@pytest.mark.covers("HYB-01", "HYB-02")
def test_what_hybrid_needs_and_refuses(lab, path):
    with pytest.raises(ValueError, match="requires explicit specification of process group"):
        lab.shard(lab.make(), path, sharding_strategy=S.HYBRID_SHARD)
    with pytest.raises(ValueError, match="Expected process_group to be passed in as either None or Tuple"):
        lab.shard(lab.make(), path, sharding_strategy=S.HYBRID_SHARD, process_group=lab.world.group)
    with pytest.raises(ValueError, match="Expected device_mesh to have ndim=2"):
        lab.shard(lab.make(), path, sharding_strategy=S.HYBRID_SHARD, device_mesh=lab.world.mesh)


@pytest.mark.world(4)
@pytest.mark.covers("HYB-04")
def test_with_a_policy_groups_are_made_once_and_shared(lab, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    model = lab.parity(policy={lab.Block}, sharding_strategy=S.HYBRID_SHARD)
    groups = {(unit.config.groups.shard, unit.config.groups.replicate) for unit in lab.units(model)}
    assert len(groups) == 1
    ((shard, replicate),) = groups
    assert (shard.size(), replicate.size()) == (2, 2)
    for group in (shard, replicate):
        dist.destroy_process_group(group)


@pytest.mark.world(4)
@pytest.mark.covers("HYB-06", "HYB-12", "B114")
def test_one_reduction_of_each_kind_per_handle_and_none_inside_no_sync(lab):
    with grid(lab.world, 2) as pair:
        reference = lab.make()
        model = lab.shard(
            copy.deepcopy(reference), policy={lab.Block}, sharding_strategy=S.HYBRID_SHARD, process_group=pair
        )
        with lab.collectives() as seen:
            with model.no_sync():
                lab.loss(model, lab.batch(0)).backward()
            assert Counter(call.op for call in seen)["reduce_scatter"] == 0
            assert Counter(call.op for call in seen)["all_reduce"] == 0
            lab.loss(model, lab.batch(1)).backward()
        orders = [call for call in seen if call.unit == "order of units"]
        assert [(call.op, call.tensor.nbytes, call.group is pair[0]) for call in orders] == [
            ("all_reduce", 16, True),
            ("all_reduce", 16, False),
        ]
        reductions = [call for call in seen if call.op != "all_gather" and call.unit != "order of units"]
        counts = Counter((call.op, call.group is pair[0]) for call in reductions)
        assert counts == {("reduce_scatter", True): 4, ("all_reduce", False): 4}
        for step in range(2):
            lab.reference_step(reference, lab.batches(step))
        lab.assert_grads(model, reference)


class Scaled(torch.nn.Module):
    """Its gradient is the input: what a micro-batch contributes is chosen to the bit."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(5))

    def forward(self, x):
        return self.weight * x


def bfloat16(value):
    return float(torch.tensor(value).to(torch.bfloat16))


@pytest.mark.world(4)
@pytest.mark.covers("B116", "HYB-12", "MP-04", "ACC-06")
@pytest.mark.parametrize("strategy", HYBRID, ids=lambda s: s.name)
@pytest.mark.parametrize("schedule", ["ssss", "nnns", "nsns"])
def test_partial_sums_of_micro_batches_are_wider_than_what_is_sent(lab, path, strategy, schedule):
    """Gradients of 257, 2, 2 and 1 on each of 2x2 ranks, sent in bfloat16, which steps by 2 from 256 to 512.

    Divided by two before and after the sum over four ranks, everything but the cast itself is exact here: what the sum
    may lose is one rounding of each amount that is sent. Rounding what is held in between gives other numbers.
    """
    amounts = [257.0, 2.0, 2.0, 1.0]
    want, waiting, low_sum, low_waiting = 0.0, 0.0, 0.0, 0.0
    for kind, amount in zip(schedule, amounts, strict=True):
        waiting += amount
        low_waiting = bfloat16(low_waiting + amount)
        if kind == "s":
            want, waiting = want + bfloat16(waiting), 0.0
            low_sum, low_waiting = bfloat16(low_sum + low_waiting), 0.0
    assert want != low_sum
    with mesh_of(2, 2) as mesh:
        precision = MixedPrecision(reduce_dtype=torch.bfloat16)
        options = {"sharding_strategy": strategy, "device_mesh": mesh, "mixed_precision": precision}
        model = lab.shard(lab.make(Scaled, dtype=torch.float32), path, **options)
        for kind, amount in zip(schedule, amounts, strict=True):
            with no_sync(model) if kind == "n" else nullcontext():
                model(torch.full((5,), amount)).sum().backward()
        handle = lab.units(model)[0].handle
        assert handle.grads.reduced_S.dtype == torch.float32
        held = [piece for piece in handle.originals.pieces_of(handle.grads.reduced_S) if piece.numel()]
        assert held
        for piece in held:
            torch.testing.assert_close(piece, torch.full_like(piece, want), rtol=0.0, atol=0.0)


@pytest.mark.world(4)
@pytest.mark.covers("HYB-07")
@pytest.mark.parametrize("strategy", HYBRID, ids=lambda s: s.name)
def test_the_variants_differ_in_what_stays_after_forward(lab, strategy):
    with grid(lab.world, 2) as pair:
        model = lab.shard(lab.make(), policy={lab.Block}, sharding_strategy=strategy, process_group=pair)
        model(lab.batch())
        stays = [unit.handle.unsharded for unit in lab.units(model)]
        assert stays == [True] + [strategy is S._HYBRID_SHARD_ZERO2] * 3


@pytest.mark.world(4)
@pytest.mark.covers("HYB-08", "HYB-13", "B006")
def test_hybrid_and_full_sharding_in_one_tree(lab):
    with grid(lab.world, 2) as pair, grid(lab.world, 1) as column:
        reference = lab.make()
        model = copy.deepcopy(reference)
        model.blocks[0] = lab.shard(model.blocks[0], sharding_strategy=S.HYBRID_SHARD, process_group=pair)
        model.blocks[1] = lab.shard(model.blocks[1], sharding_strategy=S.HYBRID_SHARD, process_group=column)
        model = lab.shard(model)
        lab.loss(model, lab.batch()).backward()
        lab.reference_step(reference, lab.batches())
        lab.assert_grads(model, reference)


@pytest.mark.world(4)
@pytest.mark.covers("HYB-09")
def test_hooks_are_refused(lab):
    with grid(lab.world, 2) as pair:
        model = lab.shard(lab.make(), sharding_strategy=S.HYBRID_SHARD, process_group=pair)
        with pytest.raises(AssertionError, match="Communication hook is not supported for hybrid strategies"):
            model.register_comm_hook(None, lambda state, grad, output: None)


@pytest.mark.world(4)
@pytest.mark.covers("HYB-10", "CLIP-02")
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_the_clipped_norm_is_that_of_plain_sharding(lab, norm_type):
    with grid(lab.world, 2) as pair:
        reference = lab.make()
        model = FSDP(
            copy.deepcopy(reference),
            use_orig_params=True,
            sharding_strategy=S.HYBRID_SHARD,
            process_group=pair,
        )
        lab.loss(model, lab.batch()).backward()
        lab.reference_step(reference, lab.batches())
        got = model.clip_grad_norm_(0.01, norm_type)
        want = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01, norm_type)
        torch.testing.assert_close(got, want, **lab.CLOSE)
        lab.assert_grads(model, reference)


@pytest.mark.world(4)
@pytest.mark.covers("HYB-14", "SYNC-01", "SYNC-03", "B072")
def test_states_are_synchronized_along_both_groups(lab, path):
    with grid(lab.world, 2) as pair:
        model = lab.make(seed=lab.world.rank)
        for block in model.blocks:
            block.scale.fill_(float(lab.world.rank + 1))
        model = lab.shard(
            model,
            path,
            policy={lab.Block},
            sharding_strategy=S.HYBRID_SHARD,
            process_group=pair,
            sync_module_states=True,
        )
        lab.assert_params(model, lab.make(seed=0))
        assert all(float(buffer) == 1.0 for buffer in model.buffers())
