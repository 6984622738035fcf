"""A parameter that no rank used has no gradient; one that any rank used has the mean, with zeros of the others."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_ref import MixedPrecision, ShardingStrategy
from fsdp_ref.comm_hooks import DefaultState, LowPrecisionState, allreduce_hook, bf16_compress_hook, reduce_scatter_hook
from fsdp_ref.composable import no_sync, register_comm_hook

S = ShardingStrategy
pytestmark = pytest.mark.filterwarnings(
    "ignore:The `NO_SHARD` sharding strategy:FutureWarning", "ignore:FSDP is switching:UserWarning"
)
STRATEGIES = pytest.mark.parametrize("strategy", [S.FULL_SHARD, S.SHARD_GRAD_OP, S.NO_SHARD], ids=lambda s: s.name)
SIZES = pytest.mark.world([2, 3])


class Choosing(nn.Module):
    """One unit with three layers, of which the caller chooses; sizes that no world size divides."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x, names):
        for name in names:
            x = x * self.scale if name == "scale" else getattr(self, name)(x).tanh()
        return x


def backward(lab, model, step, names, *, sync=True):
    with nullcontext() if sync else no_sync(model):
        model(lab.batch(step), names[lab.world.rank % len(names)]).square().mean().backward()


def reference_backward(lab, model, step, names):
    ranks = [names[rank % len(names)] for rank in range(lab.world.size)]
    total = sum(model(x, used).square().mean() for x, used in zip(lab.batches(step), ranks, strict=True))
    (total / lab.world.size).backward()


def both(lab, model, reference, step, names, *, sync=True):
    backward(lab, model, step, names, sync=sync)
    reference_backward(lab, reference, step, names)


@SIZES
@STRATEGIES
def test_no_rank_used_it(lab, orig_path, strategy):
    reference = lab.make(Choosing)
    model = lab.shard(copy.deepcopy(reference), orig_path, sharding_strategy=strategy)
    options = {"lr": 0.1, "weight_decay": 0.5}
    optim, reference_optim = (torch.optim.AdamW(m.parameters(), **options) for m in (model, reference))
    for step, names in enumerate(("a", "ab", "b", ("scale", "b", "c"), "c")):
        both(lab, model, reference, step, [names])
        lab.assert_grads(model, reference)
        for each in (optim, reference_optim):
            each.step()
            each.zero_grad()
        lab.assert_params(model, reference)


@SIZES
@STRATEGIES
@pytest.mark.parametrize("schedule", ["ss", "ns", "nns", "sns"])
def test_in_no_micro_batch(lab, orig_path, strategy, schedule):
    """Some ranks used b, in some micro-batches: everyone gets the mean. Nobody used c."""
    reference = lab.make(Choosing)
    model = lab.shard(copy.deepcopy(reference), orig_path, sharding_strategy=strategy)
    names = [(["a"], ["ab"]), (["a", "ab"], ["a"]), (["ab", "a"],), (["a"],)]
    for step, kind in enumerate(schedule):
        both(lab, model, reference, step, names[step][0], sync=kind == "s")
    lab.assert_grads(model, reference)
    assert reference.c.weight.grad is None
    model.zero_grad(set_to_none=False)
    reference.zero_grad(set_to_none=False)
    both(lab, model, reference, 9, ["ac", "a"])
    lab.assert_grads(model, reference)


@SIZES
@STRATEGIES
@pytest.mark.parametrize("drop", [False, True])
def test_zeroed_after_no_sync_and_then_not_used(lab, path, strategy, drop):
    """Zeros of the shard's shape at the end: the optimizer decays what has a gradient."""
    reference = lab.make(Choosing)
    model = lab.shard(copy.deepcopy(reference), path, policy={nn.Linear}, sharding_strategy=strategy)
    both(lab, model, reference, 0, ["ab"])
    both(lab, model, reference, 1, ["ab"], sync=False)
    model.zero_grad(set_to_none=False)
    reference.zero_grad(set_to_none=False)
    if drop and path != "flat":  # with flat parameters a layer is dropped as a whole
        model.a.bias.grad = reference.a.bias.grad = None
    both(lab, model, reference, 2, ["b"])
    for each in (model, reference):
        torch.optim.SGD(each.parameters(), lr=0.1, weight_decay=0.5).step()
    lab.assert_params(model, reference)


@pytest.mark.world(4)
@pytest.mark.parametrize("shape", [(2, 2), (1, 4), (4, 1)], ids=str)
def test_hybrid_meshes(lab, orig_path, shape, mesh_of):
    reference = lab.make(Choosing)
    with mesh_of(*shape) as mesh:
        model = lab.shard(copy.deepcopy(reference), orig_path, sharding_strategy=S.HYBRID_SHARD, device_mesh=mesh)
        for step, names in enumerate((["a", "a", "a", "ab"], ["a"], ["ab", "a", "a", "a"])):
            both(lab, model, reference, step, names, sync=step != 1)
            if step != 1:
                lab.assert_grads(model, reference)


@SIZES
def test_gradients_that_are_negative_zeros_count_as_used(lab, orig_path):
    model = lab.shard(lab.make(Choosing), orig_path)
    x = lab.batch()
    negative = lambda part: (part * -torch.zeros_like(part)).sum()
    negative(model(x, ["a"])).backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if ".a." in f".{name}" and p.numel())
    assert all(p.grad is None for name, p in model.named_parameters() if ".b." in f".{name}")


@pytest.mark.world(2)
@pytest.mark.parametrize("reduce_dtype", [torch.float16, torch.bfloat16])
@STRATEGIES
def test_gradients_that_vanish_in_low_precision_count_as_used(lab, orig_path, strategy, reduce_dtype):
    """One rank's gradients underflow to -0.0 in the cast or in the division; the other has none."""
    policy = MixedPrecision(reduce_dtype=reduce_dtype)
    build = lambda: lab.make(Choosing, dtype=torch.float32)
    model = lab.shard(build(), orig_path, sharding_strategy=strategy, mixed_precision=policy)
    tiny = torch.finfo(reduce_dtype).smallest_normal * 2**-10
    names = ["a", "b"] if lab.world.rank == 0 else ["a"]
    out = model(torch.ones(2, 3), names)
    (out * (-tiny if lab.world.rank == 0 else 0.0)).sum().backward()
    with lab.full(model, with_grads=True):
        assert all((p.grad is None) == ("c." in name or "scale" in name) for name, p in model.named_parameters())


@pytest.mark.world(2)
@pytest.mark.parametrize("low", [False, True])
@STRATEGIES
def test_hooks_that_reduce_keep_it(lab, orig_path, strategy, low):
    model = lab.shard(lab.make(Choosing), orig_path, sharding_strategy=strategy)
    group = dist.group.WORLD
    if low:
        register_comm_hook(model, LowPrecisionState(group, torch.float64), bf16_compress_hook)
    else:
        hook = allreduce_hook if strategy is S.NO_SHARD else reduce_scatter_hook
        register_comm_hook(model, DefaultState(group), hook)
    backward(lab, model, 0, ["a", "ab"])
    used = {name for name, grad in lab.grads(model).items() if grad is not None}
    assert used == {"a.weight", "a.bias", "b.weight", "b.bias"}


@SIZES
def test_what_users_make_of_gradients_counts(lab, orig_path):
    model = lab.shard(lab.make(Choosing), orig_path)
    backward(lab, model, 0, ["ab"])
    for name, p in model.named_parameters():
        if "a." in name:
            p.grad = None
        if "c." in name and p.numel():
            p.grad = torch.ones_like(p)
    backward(lab, model, 1, ["b"])
    grads = lab.grads(model)
    assert grads["a.weight"] is None and grads["scale"] is None
    torch.testing.assert_close(grads["c.weight"], torch.ones(3, 3, dtype=torch.float64))


@pytest.mark.world(2)
@pytest.mark.parametrize("frozen", [True, False])
def test_frozen_ones_have_none_and_keep_what_they_had(lab, orig_path, frozen):
    model = lab.shard(lab.make(Choosing), orig_path, sharding_strategy=S.NO_SHARD)
    if not frozen:
        backward(lab, model, 0, ["abc"])
    had = {name: p.grad for name, p in model.named_parameters() if "c." in name}
    for name, p in model.named_parameters():
        p.requires_grad_("c." not in name)
    backward(lab, model, 1, ["abc"])
    for name, p in model.named_parameters():
        if "c." in name:
            assert (p.grad is None) == frozen
            assert frozen or torch.equal(p.grad, had[name])


@SIZES
def test_a_flat_parameter_has_one_gradient(lab):
    """What is possible without original parameters: zeros where nobody used an original, None where nobody used any."""
    model = lab.shard(lab.make(Choosing), "flat")
    backward(lab, model, 0, ["a"])
    unit = lab.units(model)[0]
    pieces = dict(zip(unit.handle.fqns, unit.handle.originals.pieces_of(unit.handle.flat_param.grad), strict=True))
    assert not pieces["b.weight"].any()


@pytest.mark.world(2)
def test_it_costs_no_byte(lab, orig_path):
    """The reduction is as large as before, and nothing else is sent but the 16 bytes of ``wire_order``."""
    model = lab.shard(lab.make(Choosing), orig_path)
    sizes = []
    for names in (["abc"], ["a", "b"]):
        with lab.collectives() as seen:
            backward(lab, model, 0, names)
        sizes.append([(call.op, call.tensor.nbytes) for call in seen])
    numel = lab.units(model)[0].handle.shard_map.padded_numel
    assert sizes[0] == sizes[1]
    assert [size for op, size in sizes[0] if op == "reduce_scatter"] == [numel * 8]
    assert [size for op, size in sizes[0] if op == "all_reduce"] == [16]
