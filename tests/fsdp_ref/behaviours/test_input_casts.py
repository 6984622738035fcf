"""Which inputs are cast under mixed precision, by whom, and as part of the graph."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import MixedPrecision

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


def x_of(lab, dtype=F32):
    return lab.batch(shape=(2, 4)).to(dtype)


@pytest.mark.world(2)
@pytest.mark.covers("MP-05", "MP-08", "B013")
def test_floating_inputs_are_cast_however_they_come(lab, path):
    class Eats(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(4, 4)
            self.met = {}

        def forward(self, x, pair=None, *, more=None, ids=None):
            self.met = {"x": x.dtype, "pair": [t.dtype for t in pair], "more": more["a"].dtype, "ids": ids.dtype}
            return self.lin(x)

    model = lab.make(Eats, dtype=F32)
    spy = model
    model = lab.shard(model, path, mixed_precision=MixedPrecision(param_dtype=BF16))
    x = x_of(lab)
    model(x, (x, x.double()), more={"a": x}, ids=torch.zeros(2, dtype=torch.int64))
    assert spy.met == {"x": BF16, "pair": [BF16, BF16], "more": BF16, "ids": torch.int64}
    assert x.dtype == F32


@pytest.mark.world(2)
@pytest.mark.covers("MP-06", "B005")
def test_casts_are_part_of_the_graph(lab, path):
    upstream = nn.Linear(4, 4)
    model = lab.shard(
        lab.make(lab.Chain, dtype=F32), path, policy={lab.Spy}, mixed_precision=MixedPrecision(param_dtype=BF16)
    )
    x = x_of(lab).requires_grad_()
    model(upstream(x)).sum().backward()
    assert x.grad.dtype == F32
    assert x.grad.abs().sum() > 0
    assert upstream.weight.grad is not None


@pytest.mark.world(2)
@pytest.mark.covers("MP-07")
def test_without_casts_the_natural_error_appears(lab, path):
    precision = MixedPrecision(param_dtype=BF16, cast_root_forward_inputs=False)
    model = lab.shard(lab.make(lab.Chain, dtype=F32), path, policy={lab.Spy}, mixed_precision=precision)
    with pytest.raises(RuntimeError, match="must have the same dtype"):
        model(x_of(lab))
    # The model is not damaged by it.
    model(x_of(lab, BF16)).sum().backward()


@pytest.mark.world(2)
@pytest.mark.covers("MP-09", "MP-08", "MP-11")
@pytest.mark.parametrize("cast", [True, False])
def test_a_nested_unit_casts_its_own_inputs_only_when_asked(lab, cast):
    class External(nn.Module):
        def __init__(self):
            super().__init__()
            self.high, self.low = lab.Spy(), lab.Spy()

        def forward(self, x):
            return self.low(self.high(x)).float()

    model = lab.make(External, dtype=F32)
    high, low = model.high, model.low
    model.low = FSDP(low, mixed_precision=MixedPrecision(BF16, cast_forward_inputs=cast), use_orig_params=True)
    model = FSDP(model, use_orig_params=True)
    if cast:
        model(x_of(lab)).sum().backward()
        assert high.met["input"] == F32
        assert low.met["input"] == BF16
    else:
        with pytest.raises(RuntimeError, match="must have the same dtype"):
            model(x_of(lab))


@pytest.mark.world(2)
@pytest.mark.covers("MP-10", "MP-25")
@pytest.mark.parametrize("how", ["nested low first", "ignored high inside low"])
def test_mismatches_are_not_silently_repaired(lab, how):
    model = lab.make(lab.Chain, dtype=F32)
    if how == "nested low first":
        model.first = FSDP(model.first, mixed_precision=MixedPrecision(BF16, cast_forward_inputs=True))
        model = FSDP(model)
    else:
        model = FSDP(model, mixed_precision=MixedPrecision(BF16), ignored_modules=[model.second])
    with pytest.raises(RuntimeError, match="must have the same dtype"):
        model(x_of(lab))


@pytest.mark.world(2)
@pytest.mark.covers("COMP-14", "MP-11")
@pytest.mark.parametrize("root_owns", [False, True])
@pytest.mark.parametrize("cast_root", [False, True])
@pytest.mark.parametrize("cast_child", [False, True])
def test_the_table_of_input_casts(lab, root_owns, cast_root, cast_child):
    class Tree(nn.Module):
        def __init__(self):
            super().__init__()
            self.c1, self.c2 = lab.Spy(), lab.Spy()
            if root_owns:
                self.own = nn.Linear(4, 4)
            self.met = None

        def forward(self, x):
            self.met = x.dtype
            if root_owns:
                x = self.own(x)
            return self.c2(self.c1(x))

    model = lab.make(Tree, dtype=F32)
    low = torch.bfloat16
    child = MixedPrecision(low, cast_forward_inputs=cast_child, cast_root_forward_inputs=cast_root)
    if root_owns:
        # Root and c1 compute in fp32, c2 low; c2 is its own local root.
        lab.shard(model.c2, "composable", mixed_precision=child)
        lab.shard(model, "composable")
        if cast_root or cast_child:
            model(x_of(lab))
            assert (model.met, model.c1.met["input"], model.c2.met["input"]) == (F32, F32, low)
        else:
            with pytest.raises(RuntimeError, match="must have the same dtype"):
                model(x_of(lab))
        return
    # Units by policy: c1 and c2 low; the root owns nothing and has the same settings.
    lab.shard(model, "composable", policy={lab.Spy}, mixed_precision=child)
    if cast_root or cast_child:
        model(x_of(lab))
        assert (model.met, model.c1.met["input"], model.c2.met["input"]) == (low, low, low)
    else:
        with pytest.raises(RuntimeError, match="must have the same dtype"):
            model(x_of(lab))
