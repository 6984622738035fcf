"""What goes into units and comes out of them: containers, objects, packed sequences."""

from __future__ import annotations

import copy
from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

Pair = namedtuple("Pair", ["first", "second"])


@pytest.mark.world(2)
@pytest.mark.covers("IO-03", "B133")
def test_packed_sequences(lab, path):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(3, 4, batch_first=True)

        def forward(self, packed):
            assert isinstance(packed, nn.utils.rnn.PackedSequence)
            return self.rnn(packed)[0]

    def loss(model, x):
        packed = pack_padded_sequence(x, torch.tensor([3, 2]), batch_first=True)
        output = model(packed)
        return pad_packed_sequence(output, batch_first=True)[0].square().mean()

    reference = lab.make(Recurrent)
    model = lab.shard(copy.deepcopy(reference), path)
    x = lab.batch(shape=(2, 3, 3))
    if path == "flat":
        torch.testing.assert_close(loss(model, x), loss(reference, x), **lab.CLOSE)
        return
    loss(model, x).backward()
    for rank in range(lab.world.size):
        (loss(reference, lab.batch(rank=rank, shape=(2, 3, 3))) / lab.world.size).backward()
    lab.assert_grads(model, reference)
