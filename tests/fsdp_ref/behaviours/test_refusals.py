"""What cannot work is refused by name, at the place where it was asked for, and the model trains on as if nothing was."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

from fsdp_ref import MixedPrecision
from fsdp_ref.errors import FsdpRuntimeError, FsdpTypeError, SharedParameterError, UnshardConflictError, WritebackError
from fsdp_ref.handle.originals import Shown
from fsdp_ref.states import TrainingState, UnitState

SHARDED = UnitState.SHARDED


class Pair(nn.Module):
    """Two layers of one size; the second may share the first one's weight."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        if tied:
            self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x).tanh())


def assert_at_rest(lab, model):
    """Nothing of a pass that failed is left: no open call, no full parameter, no tracked view."""
    for unit in lab.units(model):
        assert unit.training_state is TrainingState.IDLE
        assert (unit.handle.state, unit.handle.originals.shown) == (SHARDED, Shown.SHARDED)


def assert_trains(lab, model, reference):
    """One more step of both, from gradients of this step alone."""
    for module in (model, reference):
        module.zero_grad()
    lab.loss(model, lab.batch(7)).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    lab.reference_step(reference, lab.batches(7), optim=torch.optim.SGD(reference.parameters(), lr=0.1))
    lab.assert_params(model, reference)


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param(lambda: nn.Parameter(torch.zeros(2, 3)), r"shape \(2, 3\) for \(3, 3\)", id="another shape"),
        pytest.param(lambda: None, "NoneType", id="nothing"),
    ],
)
def test_other_values_for_summoned_parameters(lab, orig_path, value, expected):
    reference = lab.make(Pair)
    inner = copy.deepcopy(reference)
    model = lab.shard(inner, orig_path)
    refused = pytest.raises(WritebackError, match=rf"Cannot writeback when the parameter shape.*b\.weight: {expected}")
    with refused, lab.full(model):
        weight, inner.b.weight = inner.b.weight, value()
    inner.b.weight = weight
    assert_trains(lab, model, reference)


@pytest.mark.world(2)
def test_tied_parameters_that_come_back_different(lab, orig_path):
    reference = lab.make(lambda: Pair(tied=True))
    inner = copy.deepcopy(reference)
    model = lab.shard(inner, orig_path)
    refused = pytest.raises(SharedParameterError, match=r"b\.weight and a\.weight were one parameter and got different")
    with refused, lab.full(model):
        weight = inner.a.weight
        inner.a.weight, inner.b.weight = nn.Parameter(torch.zeros(3, 3)), nn.Parameter(torch.ones(3, 3))
    inner.a.weight = inner.b.weight = weight
    assert_trains(lab, model, reference)


@pytest.mark.world(2)
def test_a_flat_parameter_of_another_size(lab):
    reference = lab.make(Pair)
    model = lab.shard(copy.deepcopy(reference), "flat")
    (flat,) = model.parameters()
    before = flat.data
    flat.data = torch.zeros(before.numel() + 1, dtype=before.dtype)
    with pytest.raises(WritebackError, match=rf"the flat parameter: \({before.numel()},\).*\({before.numel() + 1},\)"):
        model(lab.batch())
    flat.data = before
    assert_trains(lab, model, reference)


@pytest.mark.world(2)
def test_units_and_handles_are_not_pickled_nor_copied_in_use(lab, path):
    reference = lab.make(Pair)
    model = lab.shard(copy.deepcopy(reference), path)
    (unit,) = lab.units(model)
    for thing, expected in ((unit, "cannot pickle Unit"), (unit.handle, "cannot pickle the flat parameter")):
        with pytest.raises(FsdpTypeError, match=expected):
            pickle.dumps(thing)
    with lab.full(model):
        with pytest.raises(FsdpRuntimeError, match="deepcopy of Unit.*expected an idle unit"):
            copy.deepcopy(unit)
        with pytest.raises(
            FsdpRuntimeError, match=r"deepcopy of FlatHandle\(flat_fqns=\['a.weight.*full parameters are in"
        ):
            copy.deepcopy(unit.handle)
    assert "SHARDED" in repr(unit.handle)
    assert_trains(lab, model, reference)


@pytest.mark.world(2)
def test_backward_while_full_parameters_are_held(lab, path):
    reference = lab.make()
    model = lab.shard(copy.deepcopy(reference), path, policy={lab.Block})
    loss = lab.loss(model, lab.batch())
    with lab.full(model), pytest.raises(UnshardConflictError, match="backward of Unit.*that summon_full_params shows"):
        loss.backward()
    assert_trains(lab, model, reference)


@pytest.mark.world(2)
def test_an_optimizer_in_backward_of_a_flat_parameter(lab):
    reference = lab.make(Pair)
    model = lab.shard(copy.deepcopy(reference), "flat")
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    with pytest.raises(FsdpRuntimeError, match="only supported with use_orig_params=True"):
        lab.loss(model, lab.batch()).backward()
    (flat,) = model.parameters()
    flat._in_backward_optimizers.clear()
    assert_trains(lab, model, reference)


@pytest.mark.world(2)
def test_a_hook_after_accumulation_that_fails(lab, orig_path):
    reference = lab.make()
    model = lab.shard(copy.deepcopy(reference), orig_path, policy={lab.Block})

    def fails(param):
        raise ValueError("a hook of a user")

    hook = next(iter(model.parameters())).register_post_accumulate_grad_hook(fails)
    with pytest.raises(ValueError, match="a hook of a user"):
        lab.loss(model, lab.batch()).backward()
    assert_at_rest(lab, model)
    hook.remove()
    assert_trains(lab, model, reference)


class Picky(Mapping):
    """A mapping that nobody else can make: outputs in it cannot be replaced."""

    def __init__(self, items, password):
        del password
        self.items_ = items

    def __getitem__(self, key):
        return self.items_[key]

    def __iter__(self):
        return iter(self.items_)

    def __len__(self):
        return len(self.items_)


@pytest.mark.filterwarnings("ignore:Both mixed precision and an auto_wrap_policy:UserWarning")
@pytest.mark.world(2)
def test_outputs_that_cannot_be_cast(lab, path):
    """Casting them back fails in the unit's own part of forward, after the user's forward had ended."""

    class Strange(nn.BatchNorm1d):
        strange = False

        def forward(self, x):
            found = super().forward(x)
            return Picky({"y": found}, "secret") if self.strange else found

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.norm = nn.Linear(3, 3), Strange(3, track_running_stats=False)

        def forward(self, x):
            found = self.norm(self.lin(x))
            return found["y"] if isinstance(found, Picky) else found

    inner = lab.make(Model, dtype=torch.float32)
    norm = inner.norm  # the wrapper takes its place
    model = lab.shard(inner, path, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16), policy={Strange})
    norm.strange = True
    with pytest.raises(TypeError, match="password"):
        model(lab.batch().float())
    assert_at_rest(lab, model)
    norm.strange = False
    lab.loss(model, lab.batch().float()).backward()
    assert all(param.grad is not None for param in model.parameters() if param.numel())


@pytest.mark.world(2)
def test_what_backward_reads_and_forward_has_overwritten(lab, path):
    class Overwrites(Pair):
        wrong = False

        def forward(self, x):
            y = self.a(x).exp()
            z = self.b(y)
            if self.wrong:
                y.add_(1)
            return z

    reference = lab.make(Overwrites)
    inner = copy.deepcopy(reference)
    model = lab.shard(inner, path)
    inner.wrong = True
    with pytest.raises(RuntimeError, match="modified by an inplace operation.*at version 0, got version 1"):
        lab.loss(model, lab.batch()).backward()
    inner.wrong = False
    assert_trains(lab, model, reference)
