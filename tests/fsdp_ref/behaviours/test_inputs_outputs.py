"""What goes into units and comes out of them: containers, objects, packed sequences."""

from __future__ import annotations

import copy
from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_leaves

from fsdp_ref.wrap import ModuleWrapPolicy

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


RETURNED = {
    "a parameter": lambda module: module.weight,
    "a part of one": lambda module: {"rows": [module.weight[1:]]},
    "one transposed twice": lambda module: (module.weight.t().t(), 3),
}


@pytest.mark.world(2)
@pytest.mark.parametrize("returned", RETURNED.values(), ids=RETURNED)
@pytest.mark.parametrize("train", [True, False])
def test_a_unit_that_returns_its_own_parameters(trial, api, strategy, returned, train):
    """Their memory goes when forward ends: the caller read freed memory."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(7, 6))

        def forward(self, x):
            return returned(self)

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x):
            (weight,) = (leaf for leaf in tree_leaves(self.block(x)) if isinstance(leaf, torch.Tensor))
            return x @ weight[:6]

    case = trial(api, strategy, Table, policy=ModuleWrapPolicy({Block}))
    if train:
        case.train()
    else:
        with torch.no_grad():
            torch.testing.assert_close(
                case.loss(case.inputs(0)), case.plain(case.inputs(0)[case.world.rank]).pow(2).mean()
            )
