"""The state of any part of a sharded model is what the part of the plain model gives."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fsdp_ref import MixedPrecision, ShardingStrategy
from fsdp_ref.annotations import units_in
from fsdp_ref.states import UnitState

S = ShardingStrategy
PARTS = ["", "inp", "blocks", "blocks.0", "blocks.0.lin1", "blocks.1.lin2", "out", "head", "head.0"]
quiet = pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy:FutureWarning")


def net(lab):
    """A head in the root's unit: a part of two layers, one of which is tied to a layer in a unit below."""
    model = lab.make()
    model.head = nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 4)).double()
    model.head[1].weight = model.blocks[1].lin2.weight
    return model


def part(model, name):
    plain = getattr(model, "module", model)
    for segment in name.split(".") if name else ():
        plain = getattr(getattr(plain, "module", plain), segment)
    return plain


def sharded_states(model):
    return {unit.state for unit in units_in(model)} == {UnitState.SHARDED}


@quiet
@pytest.mark.world([2, 3])
@pytest.mark.parametrize("strategy", [S.FULL_SHARD, S.NO_SHARD], ids=lambda s: s.name)
def test_saved(lab, path, strategy):
    plain = net(lab)
    model = lab.shard(copy.deepcopy(plain), path, policy={lab.Block}, sharding_strategy=strategy)
    for name in PARTS:
        got, want = part(model, name).state_dict(), plain.get_submodule(name).state_dict()
        lab.assert_same(got, want)
        assert list(got) == list(want), name
        assert strategy is S.NO_SHARD or sharded_states(model), name
    with lab.full(model):
        lab.assert_same(part(model, "blocks.0.lin1").state_dict(), plain.blocks[0].lin1.state_dict())
    assert part(model, "blocks.0").state_dict(prefix="at.").keys() == {
        f"at.{key}" for key in plain.blocks[0].state_dict()
    }
    lab.loss(model, lab.batch()).backward()


@pytest.mark.world([2, 3])
@pytest.mark.parametrize("assign", [False, True])
def test_loaded(lab, path, assign):
    plain = net(lab)
    model = lab.shard(copy.deepcopy(plain), path, policy={lab.Block})
    for name in PARTS[1:]:
        changed = {key: value + 1 for key, value in plain.get_submodule(name).state_dict().items()}
        for each in (part(model, name), plain.get_submodule(name)):
            assert not any(each.load_state_dict(changed, assign=assign and each is not plain.get_submodule(name)))
        lab.assert_same(model.state_dict(), plain.state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        part(model, "blocks.0").load_state_dict({})
    assert sharded_states(model)
    lab.loss(model, lab.batch()).backward()


@pytest.mark.world(2)
def test_a_tied_parameter_is_saved_once(lab, path):
    model = lab.shard(net(lab), path, policy={lab.Block})
    state = model.state_dict()
    assert state["head.1.weight"] is state["blocks.1.lin2.weight"]


@pytest.mark.world(2)
def test_buffers_of_a_part_have_their_own_dtype(lab, path):
    model = lab.shard(lab.make(), path, policy={lab.Block}, mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16))
    model(lab.batch())
    assert part(model, "blocks.0").scale.dtype == torch.bfloat16
    assert part(model, "blocks.0").state_dict()["scale"].dtype == torch.float64


@pytest.mark.world(2)
def test_a_copy_saves_its_own(lab, path):
    model = lab.shard(lab.make(), path, policy={lab.Block})
    copied = copy.deepcopy(model)
    with torch.no_grad(), lab.full(copied):
        for p in copied.parameters():
            p.add_(1)
    for name in ("inp", "blocks.1.lin1"):
        mine, its = part(model, name).state_dict(), part(copied, name).state_dict()
        lab.assert_same(its, {key: value + 1 for key, value in mine.items()})
