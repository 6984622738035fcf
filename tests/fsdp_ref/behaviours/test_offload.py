"""CPU offload where the CPU computes too: accepted, and numerically nothing."""

from __future__ import annotations

import pytest
import torch

from fsdp_ref import CPUOffload, MixedPrecision, ShardingStrategy


@pytest.mark.world(2)
@pytest.mark.covers("OFF-02")
@pytest.mark.parametrize(
    "strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP], ids=lambda s: s.name
)
def test_offload_changes_no_number(lab, path, strategy):
    lab.parity(path=path, policy={lab.Block}, cpu_offload=CPUOffload(True), sharding_strategy=strategy)


@pytest.mark.world(2)
@pytest.mark.covers("OFF-02", "OFF-08")
def test_the_clipped_norm_is_on_the_cpu(lab):
    model = lab.shard(lab.make(), policy={lab.Block}, cpu_offload=CPUOffload(True))
    lab.loss(model, lab.batch()).backward()
    assert model.clip_grad_norm_(1.0).device.type == "cpu"
    assert {p.device.type for p in model.parameters()} == {"cpu"}


@pytest.mark.world(2)
@pytest.mark.covers("B033", "OFF-02")
def test_offload_with_kept_low_precision_gradients(lab):
    precision = MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16, keep_low_precision_grads=True)
    model = lab.shard(
        lab.make(dtype=torch.float32), policy={lab.Block}, cpu_offload=CPUOffload(True), mixed_precision=precision
    )
    for _ in range(2):
        lab.loss(model, lab.batch()).backward()
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.bfloat16}
