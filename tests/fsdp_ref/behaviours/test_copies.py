"""A deep copy of what is sharded, wherever it is made and whatever it becomes part of."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fsdp_ref.composable import no_sync


class Two(nn.Module):
    """A layer and its copy, side by side."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x):
        return self.second(self.first(x).tanh())


@pytest.mark.world(2)
@pytest.mark.covers("OBJ-03", "SD-01")
@pytest.mark.parametrize("strict", [True, False])
def test_a_copy_of_a_unit_may_become_part_of_a_sharded_model(lab, path, strict):
    layer = lab.shard(lab.make(lambda: nn.Linear(3, 3)), path)
    model = lab.shard(Two(layer, copy.deepcopy(layer)), path)
    saved = {name: torch.full_like(value, index) for index, (name, value) in enumerate(model.state_dict().items())}
    assert sorted(saved) == ["first.bias", "first.weight", "second.bias", "second.weight"]
    missing, unexpected = model.load_state_dict(saved, strict=strict)
    assert not missing
    assert not unexpected
    lab.assert_same(lab.params(model), saved)


@pytest.mark.world(2)
@pytest.mark.covers("OBJ-03")
def test_a_copy_made_inside_no_sync_reduces(lab, path):
    reference = lab.make()
    model = lab.shard(copy.deepcopy(reference), path, policy={lab.Block})
    with no_sync(model):
        copied = copy.deepcopy(model)
        copied_again = copy.deepcopy(model)
        lab.loss(copied_again, lab.batch()).backward()
    lab.loss(copied, lab.batch()).backward()
    lab.reference_step(reference, lab.batches())
    for each in (copied, copied_again):
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    lab.assert_params(copied, reference)
    lab.assert_params(copied_again, reference)
