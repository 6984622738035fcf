"""What a rank sees of a training step by step: what backward computes again is no batch and no loss."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_testing.training_check.evidence import Witness
from fsdp_testing.training_check.observation import Observer


class Blocks(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.reentrant = reentrant

    def forward(self, hidden):
        hidden = self.blocks[0](hidden)
        return checkpoint(self.blocks[1], hidden, use_reentrant=self.reentrant)


@pytest.mark.world(1)
@pytest.mark.parametrize("reentrant", [False, True])
def test_activations_that_backward_computes_again_are_no_batch(reentrant):
    model = Blocks(reentrant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    observer, witness = Observer(), Witness()
    with ExitStack() as stack:
        for context in (observer.watch(), witness.watch()):
            stack.enter_context(context)
        for rows in (4, 5):
            model(torch.ones(rows, 3)).sum().backward()
        optimizer.step()
    [seen], [evidence] = observer.steps, witness.steps
    assert [len(forward) for forward in seen.rows] == [4, 5]
    assert len(seen.losses) == evidence.backwards == 2
    assert observer.reader.models == [model]
