"""Clipping by the norm of all gradients of all ranks."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from fsdp_ref import CPUOffload, MixedPrecision, ShardingStrategy, clip_grad_norm_

S = ShardingStrategy
quiet = pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy:FutureWarning")
NORMS = [1.0, 2.0, 3.0, math.inf]


@quiet
@pytest.mark.world([2, 3])
@pytest.mark.covers("CLIP-02", "CLIP-04", "CLIP-07", "B147", "B054", "B059", "B056")
@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("strategy", [S.FULL_SHARD, S.SHARD_GRAD_OP, S.NO_SHARD], ids=lambda s: s.name)
@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("max_norm", [0.01, 1e6])
def test_norm_and_gradients_equal_one_process(lab, norm_type, strategy, orig, max_norm):
    reference = lab.make()
    model = lab.shard(
        copy.deepcopy(reference),
        "wrapper" if orig else "flat",
        policy={lab.Block},
        sharding_strategy=strategy,
        cpu_offload=CPUOffload(norm_type == 3.0),
    )
    lab.loss(model, lab.batch()).backward()
    lab.reference_step(reference, lab.batches())
    got = model.clip_grad_norm_(max_norm, norm_type)
    want = torch.nn.utils.clip_grad_norm_(reference.parameters(), max_norm, norm_type)
    torch.testing.assert_close(got, want, **lab.CLOSE)
    lab.world.assert_equal_across_ranks(got)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    torch.optim.SGD(reference.parameters(), lr=1.0).step()
    lab.assert_params(model, reference)


@quiet
@pytest.mark.world(2)
@pytest.mark.covers("CLIP-03", "B054", "B069")
@pytest.mark.parametrize("norm_type", NORMS)
def test_sharded_replicated_and_unmanaged_gradients_count_once(lab, norm_type):
    reference = lab.make()
    model = copy.deepcopy(reference)
    model.blocks[0] = lab.shard(model.blocks[0], sharding_strategy=S.NO_SHARD)
    model.blocks[1] = lab.shard(model.blocks[1])
    ignored = model.blocks[2]
    model = lab.shard(model, ignored_modules=[ignored])
    lab.loss(model, lab.batch()).backward()
    # Gradients of ignored modules are this rank's own: make them equal on all ranks, as a user would.
    for p in ignored.parameters():
        torch.distributed.all_reduce(p.grad)
        p.grad.div_(lab.world.size)
    lab.reference_step(reference, lab.batches())
    got = model.clip_grad_norm_(0.05, norm_type)
    want = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05, norm_type)
    torch.testing.assert_close(got, want, **lab.CLOSE)
    lab.assert_grads(model, reference)


@quiet
@pytest.mark.world([2, 3])
@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("strategy", [S.FULL_SHARD, S.NO_SHARD], ids=lambda s: s.name)
@pytest.mark.parametrize("missing", [False, True])
def test_ignored_gradients_that_differ_by_rank_count_as_their_mean(lab, orig_path, norm_type, strategy, missing):
    """What one process would compute; one norm on all ranks, also where some have no such gradient."""
    reference = lab.make()
    model = copy.deepcopy(reference)
    ignored = model.blocks[1]
    model = lab.shard(model, orig_path, policy={lab.Block}, sharding_strategy=strategy, ignored_modules=[ignored])
    lab.loss(model, lab.batch()).backward()
    lab.reference_step(reference, lab.batches())
    if missing:  # only rank 0 has one: zeros of the others count in the mean
        only = ignored.lin1.bias.grad / lab.world.size
        torch.distributed.broadcast(only, 0)
        reference.blocks[1].lin1.bias.grad = only
        if lab.world.rank != 0:
            ignored.lin1.bias.grad = None
    own = ignored.lin2.weight.grad.clone()
    got = clip_grad_norm_(model, 0.05, norm_type)
    want = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05, norm_type)
    torch.testing.assert_close(got, want, **lab.CLOSE)
    lab.world.assert_equal_across_ranks(got)
    torch.testing.assert_close(ignored.lin2.weight.grad, own * (0.05 / (want + 1e-6)), **lab.CLOSE)


@pytest.mark.world(4)
@pytest.mark.filterwarnings("ignore:FSDP is switching:UserWarning")
@pytest.mark.parametrize("shape", [(2, 2), (1, 4), (4, 1)], ids=str)
def test_ignored_gradients_on_hybrid_meshes(lab, orig_path, shape, mesh_of):
    reference = lab.make()
    model = copy.deepcopy(reference)
    with mesh_of(*shape) as mesh:
        options = {"sharding_strategy": S.HYBRID_SHARD, "device_mesh": mesh, "ignored_modules": [model.blocks[1]]}
        model = lab.shard(model, orig_path, **options)
        lab.loss(model, lab.batch()).backward()
        lab.reference_step(reference, lab.batches())
        got = clip_grad_norm_(model, 0.05)
    torch.testing.assert_close(got, torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05), **lab.CLOSE)
    lab.world.assert_equal_across_ranks(got)


@pytest.mark.world(2)
@pytest.mark.covers("CLIP-01")
def test_for_the_root_in_an_idle_moment(lab):
    model = lab.shard(lab.make(), policy={lab.Block})
    model(lab.batch()).sum().backward()
    with pytest.raises(RuntimeError, match="should only be called on the root FSDP instance"):
        model.module.blocks[0].clip_grad_norm_(1.0)
    with lab.full(model), pytest.raises(ValueError, match="expected to be in states"):
        model.clip_grad_norm_(1.0)
    with pytest.raises(ValueError, match="norm_type"):
        model.clip_grad_norm_(1.0, -1.0)
    with model.no_sync():
        model(lab.batch()).sum().backward()
    with pytest.raises(RuntimeError, match="no_sync"):
        model.clip_grad_norm_(1.0)
    model(lab.batch()).sum().backward()
    assert model.clip_grad_norm_(1.0) > 0


@pytest.mark.world(3)
@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_on_one_rank_is_the_norm_on_all(lab, path, norm_type, bad):
    for rank in range(lab.world.size):
        model = lab.shard(lab.make(), path, policy={lab.Block})
        lab.loss(model, lab.batch()).backward()
        if lab.world.rank == rank:
            next(p.grad for p in model.parameters() if p.grad is not None).view(-1)[0] = bad
        norm = clip_grad_norm_(model, 1.0, norm_type)
        torch.testing.assert_close(norm, torch.tensor(bad, dtype=torch.float64), equal_nan=True)


@pytest.mark.world(2)
@pytest.mark.covers("CLIP-06", "B060")
@pytest.mark.parametrize("path", ["wrapper", "flat"])
def test_no_gradient_on_any_rank(lab, path):
    model = lab.shard(lab.make(), path, policy={lab.Block})
    with pytest.warns(UserWarning, match="with no gradients -- returning the total norm in the default dtype"):
        norm = model.clip_grad_norm_(1.0)
    assert norm.dtype == torch.float32
    assert norm == 0.0


@pytest.mark.filterwarnings("error")
@pytest.mark.world(4)
@pytest.mark.covers("CLIP-06", "B060", "B055")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_ranks_without_gradients_join_and_hear_the_same(lab, dtype, norm_type):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor([3.0, 4.0]))

        def forward(self, x):
            return (self.w * self.w.detach()).sum()

    model = lab.shard(lab.make(Two, dtype=dtype))
    model(torch.zeros(1)).backward()
    norm = model.clip_grad_norm_(1e9, norm_type)
    assert norm.dtype == dtype
    assert norm == (5.0 if norm_type == 2.0 else 4.0)
    lab.world.assert_equal_across_ranks(norm)


@pytest.mark.world(2)
@pytest.mark.covers("CLIP-05", "B055")
def test_half_precision_squares_that_overflow(lab):
    class Big(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(8))

        def forward(self, x):
            return (self.w * x).sum()

    precision = MixedPrecision(torch.float16, keep_low_precision_grads=True)
    model = lab.shard(lab.make(Big, dtype=torch.float32), mixed_precision=precision)
    model(torch.full((8,), 1000.0)).backward()
    norm = model.clip_grad_norm_(1.0)
    assert norm.dtype == torch.float16
    torch.testing.assert_close(norm.float(), torch.tensor(1000.0 * math.sqrt(8)), rtol=2**-10, atol=0)
    for p in model.parameters():
        torch.testing.assert_close(p.grad.float(), torch.full_like(p.grad, 8**-0.5).float(), rtol=2**-9, atol=0)


@pytest.mark.world(2)
@pytest.mark.covers("B057", "CLIP-05")
def test_gradients_of_several_dtypes(lab):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4, dtype=torch.float32)
            self.b = nn.Linear(4, 4, dtype=torch.bfloat16)

        def forward(self, x):
            return self.b(self.a(x.float()).bfloat16())

    torch.manual_seed(0)
    model = Two()
    reference = copy.deepcopy(model)
    model = lab.shard(model, policy={nn.Linear})
    model(lab.batch(shape=(2, 4))).sum().backward()
    for batch in lab.batches(shape=(2, 4)):
        (reference(batch).sum() / lab.world.size).backward()
    got, want = model.clip_grad_norm_(0.1), torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want.float(), rtol=2**-6, atol=0)


@pytest.mark.world(2)
@pytest.mark.covers("B007", "CLIP-02", "FLAT-05")
def test_padding_does_not_count(lab):
    model = lab.shard(lab.make(lambda: nn.Linear(3, 3, bias=False)), "flat")
    lab.loss(model, lab.batch()).backward()
    handle = lab.units(model)[0].handle
    clean = model.clip_grad_norm_(1e9)
    padding = handle.shard_map.padding(lab.world.rank)
    assert padding == lab.world.rank, "nine elements: the second rank has one of padding"
    if padding:
        handle.flat_param.grad[-padding:] = 1e6
    assert model.clip_grad_norm_(1e9) == clean
