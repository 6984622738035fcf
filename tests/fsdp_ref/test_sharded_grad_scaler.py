"""The gradient scaler: ranks skip a step together, and scale alike ever after."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_ref import FullyShardedDataParallel, MixedPrecision
from fsdp_ref.errors import FsdpValueError
from fsdp_ref.sharded_grad_scaler import ShardedGradScaler


def make(dtype=torch.float64, fused=False, **options):
    torch.manual_seed(0)
    model = FullyShardedDataParallel(nn.Linear(3, 1, bias=False).to(dtype), use_orig_params=True, **options)
    optim = torch.optim.SGD(model.parameters(), lr=0.5, fused=fused)
    return model, optim, ShardedGradScaler("cpu", init_scale=4.0, growth_interval=2)


def backward(model, scaler):
    scaler.scale(model(torch.ones(2, 3, dtype=next(model.parameters()).dtype)).sum()).backward()


@pytest.mark.world(4)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.covers("SCL-01", "SCL-03", "B051")
def test_all_ranks_skip_what_one_cannot_step(world, fused, value):
    """The weight has three elements: the last rank has none, no gradient, and takes part."""
    model, optim, scaler = make(fused=fused)
    before = [param.detach().clone() for param in model.parameters()]
    assert sum(param.numel() for param in before) == int(world.rank < 3)
    backward(model, scaler)
    if world.rank == 1:
        for param in model.parameters():
            param.grad.fill_(value)
    scaler.step(optim)
    scaler.update()
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    assert scaler.get_scale() == 2.0
    for _ in range(2):
        optim.zero_grad()
        backward(model, scaler)
        scaler.step(optim)
        scaler.update()
    # Each gradient is a sum of two ones, unscaled to the bit: the scale is a power of two.
    assert all(torch.equal(one - 2.0, other) for one, other in zip(before, model.parameters(), strict=True))
    assert world.all_gather_object(scaler.get_scale()) == [4.0] * 4


@pytest.mark.world(2)
@pytest.mark.covers("SCL-03", "SCL-04")
def test_unscaling_by_hand_once_for_each_step_and_within_a_group(world):
    model, optim, scaler = make()
    backward(model, scaler)
    scaler.unscale_(optim)
    assert all(torch.equal(p.grad, torch.full_like(p, 2.0)) for p in model.parameters() if p.grad is not None)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optim)
    scaler.step(optim)
    with pytest.raises(RuntimeError, match=r"after step\(\)"):
        scaler.unscale_(optim)
    # In a group of its own each rank decides alone.
    alone = [dist.new_group([rank]) for rank in range(2)][world.rank]
    scaler = ShardedGradScaler("cpu", init_scale=4.0, process_group=alone)
    param = nn.Parameter(torch.zeros(1))
    scaler.scale(torch.ones(())).item()
    param.grad = torch.tensor([float("inf") if world.rank else 4.0])
    optim = torch.optim.SGD([param], lr=1.0)
    scaler.step(optim)
    scaler.update()
    assert (param.item(), scaler.get_scale()) == ((0.0, 2.0) if world.rank else (-1.0, 4.0))
    dist.destroy_process_group(alone)


class Pair(NamedTuple):
    one: object
    two: object


@pytest.mark.covers("SCL-02")
def test_containers_and_dtypes_are_kept():
    scaler = ShardedGradScaler("cpu", init_scale=8.0)
    half, double = torch.ones((), dtype=torch.bfloat16), torch.ones(2, dtype=torch.float64)
    scaled = scaler.scale([half, (double, [half]), Pair(half, double)])
    assert [type(each) for each in scaled] == [torch.Tensor, tuple, Pair]
    flat = [scaled[0], scaled[1][0], scaled[1][1][0], *scaled[2]]
    assert [value.dtype for value in flat] == [half.dtype, double.dtype, half.dtype, half.dtype, double.dtype]
    assert all((value == 8).all() for value in flat)
    assert [value.item() for value in scaler.scale(each for each in (half, half))] == [8.0, 8.0]
    with pytest.raises(FsdpValueError, match="outputs must be a Tensor or an iterable of Tensors, got 3"):
        scaler.scale(3)


# Torch 2.11 warns of every sparse tensor.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.world(2)
@pytest.mark.covers("SCL-04")
def test_sums_of_sparse_gradients_that_overflow_are_seen(world):
    table = nn.Embedding(4, 2, sparse=True).half()
    before = table.weight.detach().clone()
    optim, scaler = torch.optim.SGD(table.parameters(), lr=0.5), ShardedGradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.zeros(()))
    # Two rows of one index: each is finite in half precision, their sum is not.
    rows = torch.full((2, 2), 40000.0 if world.rank else 0.0, dtype=torch.float16)
    table.weight.grad = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), rows, (4, 2), check_invariants=False)
    scaler.step(optim)
    scaler.update()
    assert torch.equal(table.weight, before)
    assert scaler.get_scale() == 0.5


@pytest.mark.world(2)
@pytest.mark.covers("MP-26")
def test_half_precision_gradients_that_are_kept_low(world):
    precision = MixedPrecision(torch.float16, torch.float16, keep_low_precision_grads=True)
    model, optim, scaler = make(torch.float32, mixed_precision=precision)
    before = [param.detach().clone() for param in model.parameters()]
    backward(model, scaler)
    scaler.unscale_(optim)
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    assert all(grad.dtype == torch.float16 and (grad == 2).all() for grad in grads)
    for param in model.parameters():
        param.grad = None if param.grad is None else param.grad.float()
    scaler.step(optim)
    assert all(torch.equal(one - 1.0, other) for one, other in zip(before, model.parameters(), strict=True))


@pytest.mark.covers("SCL-05")
def test_without_its_device_it_does_nothing():
    if torch.cuda.is_available():
        pytest.skip("this machine has the device of the default")
    with pytest.warns(UserWarning, match="CUDA is not available"):
        scaler = ShardedGradScaler()
    loss = torch.ones(())
    assert scaler.scale(loss) is loss
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        param = nn.Parameter(torch.zeros(1))
        param.grad = torch.ones(1)
        scaler.step(torch.optim.SGD([param], lr=1.0))
        scaler.update()
    assert param.item() == -1.0
