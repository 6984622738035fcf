"""Where initial values come from: rank 0, the meta device, a user's function."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fsdp_ref import FullyShardedDataParallel as FSDP


@pytest.mark.world(2)
@pytest.mark.covers("SYNC-01")
def test_nested_wrapping_sends_nothing_twice(lab):
    model = lab.make()
    with lab.collectives() as seen:
        for index, block in enumerate(model.blocks):
            model.blocks[index] = FSDP(block, sync_module_states=True)
        FSDP(model, sync_module_states=True)
    sent = sum(call.tensor.numel() for call in seen if call.op == "broadcast")
    assert sent == sum(t.numel() for t in (*lab.make().parameters(), *lab.make().buffers()))


@pytest.mark.world(2)
@pytest.mark.covers("SYNC-02", "B070")
def test_a_module_with_buffers_only(lab, path):
    module = nn.Module()
    module.register_buffer("table", torch.full((3,), float(lab.world.rank)))
    module.forward = lambda x: x + module.table
    lab.shard(module, path, sync_module_states=True)
    assert not module.table.any()


class Counting(nn.Linear):
    """Counts how often it is initialized."""

    resets = 0

    def reset_parameters(self):
        super().reset_parameters()
        self.resets += 1


class Meta(nn.Module):
    def __init__(self, device=None):
        super().__init__()
        self.a = Counting(3, 4, device=device)
        self.inner = nn.Sequential(Counting(4, 4, device=device), Buffered(device))
        self.b = Counting(4, 2, device=device)

    def forward(self, x):
        return self.b(self.inner(self.a(x)).tanh())


class Buffered(nn.Module):
    """Only a buffer, not even in the state dict."""

    def __init__(self, device=None):
        super().__init__()
        self.register_buffer("offset", torch.empty(4, device=device), persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        with torch.no_grad():
            self.offset.fill_(0.5)

    def forward(self, x):
        return x + self.offset


@pytest.mark.world(2)
@pytest.mark.covers("META-01", "META-04", "META-05", "B073", "COMP-15")
@pytest.mark.parametrize("nested", ["no", "policy", "by hand"])
def test_meta_modules_are_reset_once_and_equal_normal_ones(lab, path, nested):
    torch.manual_seed(0)
    model = Meta("meta")
    layers = [model.a, model.inner[0], model.b]
    before = [layer.resets for layer in layers]
    torch.manual_seed(7)
    if nested == "by hand":
        made = lab.shard(model.inner, path)
        if path != "composable":
            model.inner = made
        model = lab.shard(model, path)
    else:
        model = lab.shard(model, path, policy={nn.Sequential} if nested == "policy" else None)
    assert [layer.resets for layer in layers] == [count + 1 for count in before]
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    params = lab.params(model)
    torch.manual_seed(7)
    want = Meta()
    torch.manual_seed(7)
    for layer in (want.a, want.b, want.inner[0]):  # breadth first
        layer.reset_parameters()
    got = {name: value.std() for name, value in params.items()}
    assert set(params) == {name for name, _ in want.named_parameters()}
    bounds = {"a": 3**-0.5, "inner.0": 0.5, "b": 0.5}
    for name, value in params.items():
        assert value.isfinite().all()
        assert value.abs().max() <= bounds[name.rpartition(".")[0]]
        assert value.numel() == 1 or got[name] > 0
    if nested == "no":
        lab.assert_same(params, {n: p.detach() for n, p in want.named_parameters()})
    assert all(float(buffer[0]) == 0.5 for buffer in model.buffers())
    x = lab.batch().float()
    torch.testing.assert_close(model(x), loaded(params)(x), rtol=1e-5, atol=1e-6)
    model(x).sum().backward()


def loaded(params):
    fresh = Meta()
    fresh.load_state_dict(params)
    return fresh


@pytest.mark.world(2)
@pytest.mark.covers("META-01", "META-06", "META-03")
def test_a_users_function_sees_each_managed_module_breadth_first(lab, path):
    seen = []

    def init(module):
        seen.append(type(module).__name__)
        module.to_empty(device="cpu", recurse=False)
        with torch.no_grad():
            for p in module.parameters(recurse=False):
                p.fill_(0.25)
            for b in module.buffers(recurse=False):
                b.fill_(0.5)

    model = Meta("meta")
    ignored = nn.Linear(2, 2)
    model.ignored = ignored
    kept = ignored.weight.detach().clone()
    model = lab.shard(model, path, param_init_fn=init, ignored_modules=[ignored])
    assert seen == ["Meta", "Counting", "Sequential", "Counting", "Counting", "Buffered"]
    params = lab.params(model)
    assert torch.equal(params.pop("ignored.weight"), kept)
    params.pop("ignored.bias")
    assert all((p == 0.25).all() for p in params.values())


class Inside(nn.Linear):
    """Becomes a unit; its weight is tied to a layer of the unit around it, its bias is its own."""


@pytest.mark.world(2)
@pytest.mark.covers("META-01", "SHR-06")
@pytest.mark.parametrize("by_user", [False, True])
def test_a_parameter_tied_across_units_is_initialized_and_stays_tied(lab, path, by_user):
    def init(module):
        module.to_empty(device="cpu", recurse=False)  # puts other parameters on the modules, tied no more
        for p in module.parameters(recurse=False):
            nn.init.constant_(p, 2.0)

    model = nn.Sequential(nn.Linear(3, 3, device="meta"), nn.Tanh(), Inside(3, 3, device="meta"))
    model[2].weight = model[0].weight
    model = lab.shard(model, path, policy={Inside}, param_init_fn=init if by_user else None)
    state = model.state_dict()
    assert state["0.weight"] is state["2.weight"]
    assert all(value.isfinite().all() for value in state.values())
    assert not by_user or all((value == 2.0).all() for value in state.values())
    model(torch.ones(1, 3)).sum().backward()


@pytest.mark.world(2)
@pytest.mark.covers("META-02", "META-03")
def test_what_cannot_be_materialized(lab, path):
    class NoReset(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.empty(3, device="meta"))

    with (
        pytest.warns(UserWarning, match=r"Unable to call `reset_parameters\(\)`"),
        pytest.raises(AttributeError),
    ):
        lab.shard(NoReset(), path)
    with pytest.raises(ValueError, match="to be callable"):
        lab.shard(Meta("meta"), path, param_init_fn=3)
    lab.shard(lab.make(), path, param_init_fn=3)


@pytest.mark.world(2)
@pytest.mark.covers("B068")
@pytest.mark.parametrize("by_function", [False, True])
def test_ignored_parameters_keep_identity_and_values(lab, by_function):
    def overwrite(module):
        for name, p in module.named_parameters(recurse=False):
            if p.is_meta:
                setattr(module, name, nn.Parameter(torch.empty_like(p, device="cpu")))
        with torch.no_grad():
            for tensor in module.parameters(recurse=False):
                tensor.fill_(9.0)
        for name, b in module.named_buffers(recurse=False):
            setattr(module, name, torch.zeros_like(b, device="cpu"))

    model = Meta("meta")
    kept = nn.Parameter(torch.ones(2, 4))
    model.b.weight = kept
    init = overwrite if by_function else None
    wrapped = FSDP(model, ignored_states=[kept], use_orig_params=True, param_init_fn=init)
    assert dict(wrapped.named_parameters())["_fsdp_wrapped_module.b.weight"] is kept
    assert torch.equal(kept, torch.ones(2, 4))
    if by_function:
        assert (lab.params(wrapped)["a.weight"] == 9.0).all()
