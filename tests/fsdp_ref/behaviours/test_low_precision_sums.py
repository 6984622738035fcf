"""Many small gradients add up in the widest dtype around, with no_sync and without."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from fsdp_ref import MixedPrecision, ShardingStrategy
from fsdp_ref.composable import no_sync

S = ShardingStrategy
B = torch.bfloat16
pytestmark = [
    pytest.mark.world(2),
    pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy:FutureWarning"),
]


class Weight(nn.Module):
    """The gradient is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5))

    def forward(self, x):
        return (self.weight * x).sum()


def add_up(lab, model, *, sync, times=128):
    """Add 1 and 127 times 1 / 256, each of them exact in bfloat16; a sum in bfloat16 stays at 1."""
    for index in range(times):
        last = index == times - 1
        x = torch.full((5,), 1.0 if index == 0 else 2.0**-8, dtype=model.dtype if hasattr(model, "dtype") else None)
        with nullcontext() if sync or last else no_sync(model):
            model(x).backward()
    grads = lab.grads(model)["weight"]
    return float(grads.double().min()), float(grads.double().max())


@pytest.mark.parametrize("strategy", [S.FULL_SHARD, S.NO_SHARD], ids=lambda s: s.name)
@pytest.mark.parametrize(
    "policy",
    [MixedPrecision(B), MixedPrecision(B, torch.float32), MixedPrecision(reduce_dtype=B)],
    ids=["param", "param_and_wide_reduction", "reduction"],
)
@pytest.mark.parametrize("sync", [False, True])
def test_of_wide_parameters(lab, orig_path, strategy, policy, sync):
    model = lab.shard(Weight(), orig_path, sharding_strategy=strategy, mixed_precision=policy)
    want = 1 + 127 / 256
    if policy.reduce_dtype is not torch.float32 and not sync:
        want = 1.5  # the sum is exact, and then rounded for the reduction, once
    assert add_up(lab, model, sync=sync) == (want, want)


@pytest.mark.parametrize("strategy", [S.FULL_SHARD, S.NO_SHARD], ids=lambda s: s.name)
@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_of_narrow_gradients(lab, orig_path, strategy, sync, kept):
    """Gradients that are shown in bfloat16, because parameters are or because users ask for it, round the exact sum."""
    policy = (
        MixedPrecision(reduce_dtype=B, keep_low_precision_grads=True) if kept else MixedPrecision(None, torch.float32)
    )
    model = lab.shard(
        Weight() if kept else Weight().to(B), orig_path, sharding_strategy=strategy, mixed_precision=policy
    )
    model.dtype = torch.float32 if kept else B
    assert add_up(lab, model, sync=sync) == (1.5, 1.5)
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} <= {B}


@pytest.mark.parametrize("edit", ["in place", "cleared"])
def test_what_users_make_of_a_rounded_sum_counts(lab, orig_path, edit):
    policy = MixedPrecision(reduce_dtype=B, keep_low_precision_grads=True)
    model = lab.shard(Weight(), orig_path, mixed_precision=policy)
    add_up(lab, model, sync=True, times=64)
    for p in model.parameters():
        if edit == "cleared":
            p.grad = None
        elif p.grad is not None:
            p.grad.zero_()
    assert add_up(lab, model, sync=True, times=1) == (1.0, 1.0)
