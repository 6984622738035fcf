"""Modules that change their own parameters in forward train as in one process, or are refused in a sentence."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fsdp_ref import MixedPrecision, ShardingStrategy
from fsdp_ref.errors import ParametersChangedError

S = ShardingStrategy
pytestmark = [
    pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy:FutureWarning"),
    pytest.mark.filterwarnings("ignore:code has both parameters with requires_grad:UserWarning"),
]
strategies = pytest.mark.parametrize("strategy", [S.FULL_SHARD, S.SHARD_GRAD_OP, S.NO_SHARD], ids=lambda s: s.name)


class Edits(nn.Module):
    """A layer, and a way to change itself."""

    how = ""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, x):
        if self.how == "clips":
            with torch.no_grad():
                self.lin.weight.clamp_(-0.3, 0.3)
        elif self.how == "data":
            self.lin.weight.data.clamp_(-0.3, 0.3)
        elif self.how == "tracked":
            self.lin.weight.mul_(0.5)
        elif self.how == "after use":
            y = self.lin(x)
            with torch.no_grad():
                self.lin.weight.mul_(0.9)
            return y
        return self.lin(x)


class Code(nn.Module):
    """A frozen parameter that moves in forward: a codebook, or the bias of a router."""

    how = ""

    def __init__(self):
        super().__init__()
        self.code = nn.Parameter(torch.zeros(5), requires_grad=False)
        self.rows = nn.Embedding(6, 5, max_norm=0.5)

    def forward(self, x):
        if self.how == "moves":
            self.code.add_(1.0)
        elif self.how == "data":
            self.code.data.add_(1.0)
        elif self.how == "by batch":
            self.code.add_(x.detach().mean())
        return (self.rows(torch.tensor([0, 1, 2])).sum(0) + self.code) * x.sum()


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.edits, self.code, self.out = nn.Linear(3, 3), Edits(), Code(), nn.Linear(5, 1)

    def forward(self, x):
        return self.out(self.code(self.edits(torch.tanh(self.inp(x)))))


def model_of(lab, edits="", code=""):
    model = lab.make(Whole)
    model.edits.how, model.code.how = edits, code
    return model


def train(lab, model, steps=3, own_batch=False):
    """Train; all ranks have one batch, so that one process computes the same from it."""
    optim = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
    for step in range(steps):
        lab.loss(model, lab.batch(step, None if own_batch else 0)).backward()
        optim.step()
        optim.zero_grad()


@pytest.mark.world([2, 3])
@strategies
@pytest.mark.parametrize(("edits", "code"), [("clips", ""), ("", "moves")], ids=str)
def test_a_change_in_place_trains_as_in_one_process(lab, orig_path, strategy, edits, code):
    """Weight clipping, a maximal norm, a codebook: in the first two units of the model, and twice in one forward."""
    reference = model_of(lab, edits, code)
    model = lab.shard(copy.deepcopy(reference), orig_path, policy={Edits, Code}, sharding_strategy=strategy)
    train(lab, reference)
    train(lab, model)
    lab.assert_params(model, reference)


@pytest.mark.world(2)
@strategies
def test_flat_parameters_keep_it_too(lab, strategy):
    reference = lab.make(Edits)
    reference.how = "clips"
    model = lab.shard(copy.deepcopy(reference), "flat", sharding_strategy=strategy)
    train(lab, reference)
    train(lab, model)
    lab.assert_params(model, reference)


@pytest.mark.world(2)
@pytest.mark.parametrize("strategy", [S.FULL_SHARD, S.SHARD_GRAD_OP], ids=lambda s: s.name)
@pytest.mark.parametrize(("edits", "code"), [("data", ""), ("", "data")], ids=str)
def test_a_change_that_nobody_counts_is_refused_on_every_rank(lab, path, strategy, edits, code):
    """By way of ``.data``: only the rank that owns the element could notice, and all of them hear of it."""
    plain = model_of(lab, edits, code)
    plain.code.requires_grad_(path == "flat")  # one flat parameter is trained or frozen as a whole
    model = lab.shard(plain, path, policy={Edits, Code}, sharding_strategy=strategy)
    with pytest.raises(ParametersChangedError, match="torch.no_grad") as info:
        train(lab, model)
    assert ("'edits'" if edits else "'code'") in str(info.value)
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.world(2)
@strategies
@pytest.mark.parametrize("rows", ["by batch", "max_norm"])
def test_a_change_that_differs_by_rank_is_refused(lab, orig_path, strategy, rows):
    plain = model_of(lab, "", rows)
    if rows == "max_norm":
        plain.code.forward = lambda x: plain.code.rows(torch.tensor([lab.world.rank])).sum(0) * x.sum()
        with torch.no_grad():
            plain.code.rows.weight.mul_(10.0)
    model = lab.shard(plain, orig_path, policy={Edits, Code}, sharding_strategy=strategy)
    with pytest.raises(ParametersChangedError, match="differently") as info:
        train(lab, model, own_batch=True)
    assert "'code'" in str(info.value)


@pytest.mark.world(2)
@strategies
@pytest.mark.parametrize(
    ("how", "words"), [("after use", "modified by an inplace operation"), ("tracked", "used in an in-place operation")]
)
def test_what_one_process_refuses(lab, orig_path, strategy, how, words):
    with pytest.raises(RuntimeError, match=words):
        train(lab, model_of(lab, how))
    model = lab.shard(model_of(lab, how), orig_path, policy={Edits}, sharding_strategy=strategy)
    with pytest.raises(ParametersChangedError, match=words) as info:
        train(lab, model)
    assert "lin.weight" in str(info.value)


@pytest.mark.world(2)
@pytest.mark.parametrize("strategy", [S.FULL_SHARD, S.SHARD_GRAD_OP], ids=lambda s: s.name)
def test_lower_precision_changes_what_was_changed_and_nothing_else(lab, strategy):
    """What forward did not touch keeps all of its digits."""
    plain = lab.make(Edits, dtype=torch.float32)
    plain.how = "clips"
    before = {name: param.detach().clone() for name, param in plain.named_parameters()}
    model = lab.shard(plain, "wrapper", sharding_strategy=strategy, mixed_precision=MixedPrecision(torch.bfloat16))
    with torch.no_grad():
        model(lab.batch().float())
    for name, value in lab.params(model).items():
        kept = before[name].abs() <= 0.3 if name == "lin.weight" else torch.ones_like(value, dtype=torch.bool)
        assert torch.equal(value[kept], before[name][kept])
        assert value[~kept].abs().sub(0.3).abs().max() < 0.3 / 128 if (~kept).any() else True


@pytest.mark.world(2)
@pytest.mark.parametrize("offloads", [False, True])
def test_evaluation_keeps_a_change(lab, orig_path, offloads):
    from fsdp_ref import CPUOffload

    reference = model_of(lab, code="moves")
    options = {"cpu_offload": CPUOffload(offload_params=True)} if offloads else {}
    model = lab.shard(copy.deepcopy(reference), orig_path, policy={Edits, Code}, **options)
    for each in (model, reference):
        with torch.no_grad():
            each(lab.batch(0, 0))
    lab.assert_params(model, reference)
