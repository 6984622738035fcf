"""Full parameters in a user's hands."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import ShardingStrategy
from fsdp_ref.composable import unshard_params
from fsdp_ref.states import TrainingState

S = ShardingStrategy
quiet = pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy:FutureWarning")


@pytest.mark.world(2)
@pytest.mark.covers("SUM-01", "SUM-02", "SUM-17", "SUM-18", "OBJ-04")
def test_what_is_seen_inside(lab, path):
    reference = lab.make()
    model = lab.shard(copy.deepcopy(reference), path, policy={lab.Block})
    want = {name: tuple(p.shape) for name, p in reference.named_parameters()}
    for context in (FSDP.summon_full_params, unshard_params):
        with context(model):
            got = {name: tuple(p.shape) for name, p in model.named_parameters()}
            assert got == want
            assert all(type(p) is nn.Parameter for p in model.parameters())
            assert [name for name, _ in model.named_buffers()] == [name for name, _ in reference.named_buffers()]
            assert not any("_flat_param" in name for name in got)
            for p, q in zip(model.parameters(), reference.parameters(), strict=True):
                assert torch.equal(p, q)
    prefixed = [name for name, _ in model.named_parameters()]
    if path == "wrapper":
        assert all(name.startswith("_fsdp_wrapped_module.") for name in prefixed)
        assert [n for n, _ in model.named_parameters(prefix="x", recurse=True)] == ["x." + n for n in prefixed]
        with FSDP.summon_full_params(nn.Sequential(model)):
            assert [name for name, _ in model.module.blocks[0].named_parameters()] == [
                "lin1.weight",
                "lin1.bias",
                "lin2.weight",
                "lin2.bias",
            ]


@pytest.mark.world(2)
@pytest.mark.covers("SUM-01")
def test_only_its_own_unit(lab):
    model = lab.shard(lab.make(), policy={lab.Block})
    with FSDP.summon_full_params(model, recurse=False):
        assert model.module.inp.weight.shape == (4, 3)
        assert model.module.blocks[0].module.lin1.weight.dim() == 1
    with FSDP.summon_full_params(model.module.blocks, recurse=False):
        assert model.module.blocks[0].module.lin1.weight.dim() == 1
    with FSDP.summon_full_params(model.module.blocks):
        assert model.module.blocks[0].module.lin1.weight.shape == (5, 4)


EDITS = {
    "in place": lambda m, name, value: getattr(m, name).copy_(value),
    "data": lambda m, name, value: setattr(getattr(m, name), "data", value.clone()),
    "attribute": lambda m, name, value: setattr(m, name, nn.Parameter(value.clone())),
}


@quiet
@pytest.mark.world(2)
@pytest.mark.covers("SUM-03", "SUM-04", "B087", "B088")
@pytest.mark.parametrize("strategy", [S.FULL_SHARD, S.NO_SHARD], ids=lambda s: s.name)
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("writeback", [True, False])
def test_edits_survive_however_they_are_made_or_not_at_all(lab, path, strategy, edit, writeback):
    reference = lab.make(lambda: nn.Linear(3, 3))
    model = lab.shard(copy.deepcopy(reference), path, sharding_strategy=strategy)
    inner = model.module if path != "composable" else model
    value = torch.arange(9, dtype=torch.float64).reshape(3, 3)
    with lab.full(model, writeback=writeback), torch.no_grad():
        EDITS[edit](inner, "weight", value)
    if writeback:
        want = value
    elif strategy is S.NO_SHARD:
        # Nothing is copied there, so an edit in place is an edit of the parameter itself, as in torch.
        want = value if edit == "in place" else None
    else:
        want = reference.weight.detach()
    if want is not None:
        assert torch.equal(lab.params(model)["weight"], want)
        x = lab.batch()
        torch.testing.assert_close(model(x), nn.functional.linear(x, want, reference.bias), **lab.CLOSE)
    assert torch.equal(lab.params(model)["bias"], reference.bias)
    assert isinstance(list(model.parameters())[0], nn.Parameter)


@pytest.mark.world(3)
@pytest.mark.covers("SUM-03")
def test_each_rank_persists_its_own_region_and_no_padding(lab, path):
    model = lab.shard(lab.make(lambda: nn.Linear(2, 2)), path)
    with lab.full(model), torch.no_grad():
        for p in model.parameters():
            p.fill_(float(lab.world.rank))
    handle = lab.units(model)[0].handle
    pieces = handle.shard_map.param_spans(lab.world.rank)
    for piece in pieces:
        view = handle.shard_S[piece.offset_in_shard : piece.offset_in_shard + piece.span_in_param.numel]
        assert (view == lab.world.rank).all()
    padding = handle.shard_map.padding(lab.world.rank)
    assert not handle.shard_S[handle.shard_map.shard_numel - padding :].any()


@pytest.mark.world(3)
@pytest.mark.covers("SUM-05", "SUM-21", "B021")
@pytest.mark.parametrize("writeback", [True, False])
def test_rank_zero_only(lab, path, writeback):
    reference = lab.make()
    model = lab.shard(copy.deepcopy(reference), path, policy={lab.Block})
    shapes = [tuple(p.shape) for p in reference.parameters()]
    with lab.full(model, rank0_only=True, writeback=writeback), torch.no_grad():
        if lab.world.rank == 0:
            assert [tuple(p.shape) for p in model.parameters()] == shapes
            for p in model.parameters():
                p.add_(1)
        else:
            assert all(p.dim() == 1 for p in model.parameters())
    if writeback:
        with torch.no_grad():
            for p in reference.parameters():
                p.add_(1)
    lab.assert_params(model, reference)
    lab.loss(model, lab.batch()).backward()


@pytest.mark.world(2)
@pytest.mark.covers("SUM-06", "B084")
@pytest.mark.parametrize("rank0_only", [True, False])
@pytest.mark.parametrize("writeback", [True, False])
@pytest.mark.filterwarnings("ignore:.*redundantly copied:UserWarning")
def test_offload_on_the_cpu_is_harmless(lab, path, rank0_only, writeback):
    model = lab.shard(lab.make(), path, policy={lab.Block})
    reference = lab.make()
    for _ in range(2):
        with lab.full(model, offload_to_cpu=True, rank0_only=rank0_only, writeback=writeback):
            if lab.world.rank == 0 or not rank0_only:
                for p, q in zip(model.parameters(), reference.parameters(), strict=True):
                    assert p.device.type == "cpu"
                    assert torch.equal(p, q)
        lab.loss(model, lab.batch()).backward()


@quiet
@pytest.mark.world(2)
@pytest.mark.covers("SUM-07")
@pytest.mark.filterwarnings("ignore:.*redundantly copied:UserWarning")
@pytest.mark.parametrize("writeback", [True, False])
def test_whole_parameters_are_offloaded_as_copies(lab, path, writeback):
    """Torch refuses this; a copy is edited, and kept if the user asks for that."""
    model = lab.shard(lab.make(), path, sharding_strategy=S.NO_SHARD)
    with lab.full(model, offload_to_cpu=True, writeback=writeback), torch.no_grad():
        for p in model.parameters():
            p.mul_(3)
    with lab.full(model):
        for p, q in zip(model.parameters(), lab.make().parameters(), strict=True):
            assert torch.equal(p, q * 3 if writeback else q)


@quiet
@pytest.mark.world(2)
@pytest.mark.covers("SUM-08")
def test_options_that_do_not_go_together(lab):
    model = lab.shard(lab.make(), policy={lab.Block})
    with pytest.warns(UserWarning, match="redundantly copied to CPU"), lab.full(model, offload_to_cpu=True):
        pass
    flat = lab.shard(lab.make(), "flat")
    with pytest.raises(NotImplementedError, match="with_grads"), lab.full(flat, with_grads=True):
        pass
    with (
        pytest.raises(NotImplementedError, match="with_grads"),
        lab.full(model, with_grads=True, offload_to_cpu=True, rank0_only=True),
    ):
        pass
    for each in (model, flat):
        assert all(unit.training_state is TrainingState.IDLE for unit in lab.units(each))
        lab.loss(each, lab.batch()).backward()


@pytest.mark.world(2)
@pytest.mark.covers("SUM-10", "ORIG-19")
@pytest.mark.parametrize("strategy", [S.FULL_SHARD, S.SHARD_GRAD_OP], ids=lambda s: s.name)
def test_between_forward_and_backward(lab, path, strategy):
    reference = lab.make()
    model = lab.shard(copy.deepcopy(reference), path, policy={lab.Block}, sharding_strategy=strategy)
    loss = lab.loss(model, lab.batch())
    before = [unit.handle.unsharded for unit in lab.units(model)]
    lab.assert_params(model, reference)
    assert [unit.handle.unsharded for unit in lab.units(model)] == before
    loss.backward()
    lab.reference_step(reference, lab.batches())
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    lab.assert_params(model, reference)


@pytest.mark.world(2)
@pytest.mark.covers("SUM-11")
@pytest.mark.parametrize("ran", [False, True])
def test_in_the_backward_of_something_else(lab, path, ran):
    """A backward that goes through no unit is none of the model's business."""
    reference = lab.make()
    model = lab.shard(copy.deepcopy(reference), path, policy={lab.Block})
    if ran:
        lab.loss(model, lab.batch()).backward()
        model.zero_grad()
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    seen = []
    y.register_hook(lambda grad: seen.append(lab.params(model)))
    y.sum().backward()
    (found,) = seen
    assert all(torch.equal(found[name], param) for name, param in reference.named_parameters())


@pytest.mark.world(2)
@pytest.mark.covers("SUM-11", "RUN-10")
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_in_the_middle_of_computation(lab, path, when):
    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(3, 3)
            self.ask = lambda: None

        def forward(self, x):
            y = self.lin(x)
            if when == "forward":
                self.ask()
            elif y.requires_grad:
                y.register_hook(lambda grad: self.ask())
            return y.tanh()

    inner = lab.make(Asks)
    model = lab.shard(inner, path)

    def ask():
        with lab.full(model):
            pass

    inner.ask = ask
    with pytest.raises(AssertionError, match="Cannot manually unshard parameters during forward/backward"):
        model(lab.batch()).sum().backward()
    inner.ask = lambda: None
    model.zero_grad()
    model(lab.batch()).sum().backward()
    assert all(unit.training_state is TrainingState.IDLE for unit in lab.units(model))


@pytest.mark.world(2)
@pytest.mark.covers("SUM-12", "SUM-13", "SUM-14", "RUN-10")
def test_nesting_forward_and_exceptions_inside(lab, path):
    model = lab.shard(lab.make(), path, policy={lab.Block})
    reference = lab.make()

    def check():
        assert all(unit.training_state is TrainingState.IDLE for unit in lab.units(model))
        assert not any(unit.handle.unsharded for unit in lab.units(model))
        lab.assert_params(model, reference)

    with pytest.raises(AssertionError, match="when already unsharding parameters"), lab.full(model), lab.full(model):
        pass
    check()
    with pytest.raises(AssertionError, match="Expects tensor to be unsharded"), lab.full(model):
        model(lab.batch())
    check()
    with pytest.raises(ValueError, match="boom"), lab.full(model):
        raise ValueError("boom")
    check()
    lab.loss(model, lab.batch()).backward()


@pytest.mark.world(2)
@pytest.mark.covers("SUM-16")
def test_two_models_at_once(lab, path):
    one, two = lab.shard(lab.make(), path), lab.shard(lab.make(seed=1), path)
    with lab.full(one), lab.full(two), torch.no_grad():
        for p, q in zip(one.parameters(), two.parameters(), strict=True):
            assert p.shape == q.shape
            p.copy_(q)
    lab.assert_params(one, lab.make(seed=1))


@pytest.mark.world(2)
@pytest.mark.covers("SUM-18")
def test_from_a_root_that_is_no_unit(lab):
    model = lab.make()
    for block in model.blocks:
        lab.shard(block, "composable")
    with unshard_params(model), torch.no_grad():
        assert dict(model.named_parameters()).keys() == dict(lab.make().named_parameters()).keys()
        model.blocks[0].lin1.weight.zero_()
    with unshard_params(model):
        assert not model.blocks[0].lin1.weight.any()
        assert model.blocks[1].lin1.weight.any()


@pytest.mark.world(2)
@pytest.mark.covers("SUM-19")
def test_a_state_dict_inside(lab, path):
    reference = lab.make()
    model = lab.shard(copy.deepcopy(reference), path, policy={lab.Block})
    with lab.full(model):
        inner = model if path == "composable" else model.module
        if path == "composable":
            state = {name: value.clone() for name, value in inner.state_dict().items()}
            assert state.keys() == reference.state_dict().keys()
            assert all(torch.equal(state[name], value) for name, value in reference.state_dict().items())
        named = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert all(torch.equal(named[name], p) for name, p in reference.named_parameters())


@pytest.mark.world(2)
@pytest.mark.covers("SUM-20")
@pytest.mark.parametrize("async_op", [True, False])
def test_an_early_gather_is_not_repeated_by_forward(lab, async_op):
    model = lab.shard(lab.make(), policy={lab.Block})
    model(lab.batch()).sum().backward()
    with lab.collectives() as seen:
        pending = model._unshard(async_op=async_op)
        assert (pending is not None) == async_op
        assert len(seen) == 1
        if pending is not None:
            pending.wait()
        output = model(lab.batch())
    assert sum(call.op == "all_gather" for call in seen) == 4
    reference = lab.make()
    torch.testing.assert_close(output, reference(lab.batch()), **lab.CLOSE)


@pytest.mark.world(2)
@pytest.mark.covers("APP-01", "APP-02", "APP-03", "META-06", "B003")
def test_apply(lab):
    from fsdp_ref import MixedPrecision

    for precision in (None, MixedPrecision(param_dtype=torch.float64)):
        model = lab.shard(lab.make(), policy={lab.Block}, mixed_precision=precision)

        @torch.no_grad()
        def init(module):
            if isinstance(module, nn.Linear):
                assert module.weight.dim() == 2
                module.weight.fill_(module.weight.shape[0])

        assert model.module.blocks[0].apply(init) is model.module.blocks[0]
        assert model.apply(init) is model
        params = lab.params(model)
        assert all((p == p.shape[0]).all() for name, p in params.items() if name.endswith("weight"))
        model(lab.batch()).sum().backward()
        assert [unit.is_root for unit in lab.units(model)] == [True, False, False, False]
        with pytest.raises(ValueError, match="expected to be in states"), lab.full(model):
            model.apply(init)
