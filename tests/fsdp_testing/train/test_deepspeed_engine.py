"""What DeepSpeed steps and no accessor of it reads is known as such."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fsdp_testing.train.deepspeed_engine import unread


@pytest.mark.parametrize("mark", ["", "ds_id", "_hp_mapping"])
def test_masters_beside_plain_parameters_are_read_by_nobody(mark: str) -> None:
    """As stage 0 keeps them in low precision; at other stages each parameter has a mark by which its accessors work."""
    model = nn.Linear(2, 2, dtype=torch.bfloat16)
    masters = [parameter.detach().float() for parameter in model.parameters()]
    if mark:
        for parameter in model.parameters():
            setattr(parameter, mark, None)
    engine = SimpleNamespace(module=model)
    found = unread(engine, masters)
    assert [*map(id, found)] == ([] if mark else [*map(id, masters)])
    assert unread(engine, [*model.parameters()]) == []
