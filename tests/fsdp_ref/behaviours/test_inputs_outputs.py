"""What goes into units and comes out of them: containers, objects, packed sequences."""

from __future__ import annotations

import copy
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from fsdp_ref import ShardingStrategy

S = ShardingStrategy
strategies = pytest.mark.parametrize("strategy", [S.FULL_SHARD, S.SHARD_GRAD_OP], ids=lambda s: s.name)
Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Data:
    value: torch.Tensor
    note: str = "note"


@dataclass(frozen=True)
class Frozen:
    value: torch.Tensor


class Custom:
    """An object that nobody knows how to look into."""

    def __init__(self, value):
        self.value = value


CONTAINERS = {
    "tensor": (lambda y: y, lambda o: o),
    "list": (lambda y: [y, 1, None], lambda o: o[0]),
    "dict": (lambda y: {"y": y, "n": {"z": y * 2}}, lambda o: o["y"] + o["n"]["z"]),
    "tuple": (lambda y: (y, (y, "s")), lambda o: o[0] + o[1][0]),
    "namedtuple": (lambda y: Pair(y, y * 2), lambda o: o.first + o.second),
    "dataclass": (lambda y: Data(y), lambda o: o.value),
    "frozen dataclass": (lambda y: Frozen(y), lambda o: o.value),
    "ordered dict": (lambda y: OrderedDict(a=y), lambda o: o["a"]),
    "set": (lambda y: {y}, lambda o: next(iter(o))),
    "object": (lambda y: Custom(y), lambda o: o.value),
}


class Contained(nn.Module):
    kind = "tensor"

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, x):
        return CONTAINERS[self.kind][0](self.lin(x).tanh())


@pytest.mark.world(2)
@pytest.mark.covers("IO-02", "IO-03", "IO-04", "B075", "B133")
@pytest.mark.parametrize("kind", CONTAINERS)
@strategies
def test_outputs_in_containers(lab, path, kind, strategy):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp, self.inner = nn.Linear(3, 3), Contained()

        def forward(self, x):
            self.inner_output = self.inner(self.inp(x))
            return self.inner_output

    Contained.kind = kind

    def loss(model, x):
        output = model(x)
        assert type(output) is type(CONTAINERS[kind][0](x))
        return CONTAINERS[kind][1](output).square().mean()

    try:
        lab.parity(Outer, path, policy={Contained}, sharding_strategy=strategy, loss=loss, steps=2)
    finally:
        Contained.kind = "tensor"


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


@pytest.mark.world(2)
@pytest.mark.covers("IO-01")
def test_inputs_arrive_unchanged(lab, path):
    met = []

    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(3, 3)

        def forward(self, *args, **kwargs):
            met.append((args, kwargs))
            return self.lin(args[0])

    x = lab.batch()
    args = (x, [x, 1], (x,), Pair(x, 2), {"a": x})
    model = lab.shard(lab.make(Takes), path)
    model(*args, more={"b": Data(x)}, none=None)
    ((got, kwargs),) = met
    assert [type(value) for value in got] == [type(value) for value in args]
    assert got[0] is x
    assert got[3].second == 2
    assert kwargs["more"]["b"].note == "note"
    assert kwargs["none"] is None
