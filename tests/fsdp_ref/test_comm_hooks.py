"""Reduction hooks by themselves: what they make of a gradient, where the result goes, and under which name."""

from __future__ import annotations

import pytest
import torch

from fsdp_ref.comm_hooks import (
    DefaultState,
    LowPrecisionState,
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    reduce_scatter_hook,
)

COMPRESSING = {torch.float16: fp16_compress_hook, torch.bfloat16: bf16_compress_hook}


def own(world, numel):
    return torch.arange(float(numel)) + 8 * world.rank


def mean(world, numel):
    return torch.arange(float(numel)) + 8 * sum(range(world.size)) / world.size


@pytest.mark.world([2, 3, 4])
def test_means_of_all_and_of_chunks(world, watch_collectives):
    state = DefaultState(world.group)
    with watch_collectives() as seen:
        grad = own(world, 4)
        allreduce_hook(state, grad)
        torch.testing.assert_close(grad, mean(world, 4))
        output = torch.empty(2)
        reduce_scatter_hook(state, own(world, 2 * world.size), output)
        torch.testing.assert_close(output, mean(world, 2 * world.size)[2 * world.rank :][:2])
    assert [(call.op, call.unit) for call in seen] == [
        ("all_reduce", "allreduce_hook"),
        ("reduce_scatter", "reduce_scatter_hook"),
    ]


@pytest.mark.world(2)
@pytest.mark.parametrize("given", [torch.float32, torch.float64])
@pytest.mark.parametrize("low", list(COMPRESSING))
def test_compressed_means_come_back_in_the_dtype_of_the_parameters(world, low, given):
    state = LowPrecisionState(world.group, torch.float64)
    grad = own(world, 4).to(given)
    storage = grad.data_ptr()
    COMPRESSING[low](state, grad)
    torch.testing.assert_close(grad, mean(world, 4).double(), rtol=0, atol=0)
    assert (grad.data_ptr() == storage) == (given is torch.float64)
    output = torch.empty(2, dtype=given)
    COMPRESSING[low](state, own(world, 4).to(given), output)
    torch.testing.assert_close(output, mean(world, 4)[2 * world.rank :][:2].double(), rtol=0, atol=0)
    kept = own(world, 4).to(given)
    COMPRESSING[low](state, kept, torch.empty(2, dtype=given))
    assert torch.equal(kept, own(world, 4).to(given))  # only a copy of it was divided
