"""Users keep their own parameter objects: what they show, and what becomes of what is done to them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fsdp_ref import ShardingStrategy
from fsdp_ref.wrap import ModuleWrapPolicy

S = ShardingStrategy
quiet = pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy:FutureWarning")


@pytest.mark.world(2)
@pytest.mark.covers("ORIG-01", "ORIG-02", "FLAT-01")
def test_objects_names_and_shapes_outside_of_computation(lab, orig_path):
    plain = lab.make()
    objects = dict(plain.named_parameters())
    model = lab.shard(plain, orig_path, policy={lab.Block})
    prefix = "" if orig_path == "composable" else "_fsdp_wrapped_module."
    for step in range(2):
        found = {name.replace("_fsdp_wrapped_module.", ""): p for name, p in model.named_parameters()}
        assert all(name.startswith(prefix) for name, _ in model.named_parameters())
        assert list(found) == list(objects)
        assert all(found[name] is objects[name] for name in objects)
        for unit in lab.units(model):
            handle = unit.handle
            spans = {piece.param_index: piece for piece in handle.shard_map.param_spans(lab.world.rank)}
            for index, p in enumerate(handle.originals.params):
                assert p.dim() == 1
                assert p.numel() == (spans[index].span_in_param.numel if index in spans else 0)
                if index in spans:
                    assert p.data_ptr() == handle.shard_S[spans[index].offset_in_shard :].data_ptr()
        lab.loss(model, lab.batch(step)).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()


@quiet
@pytest.mark.world(2)
@pytest.mark.covers("ORIG-03")
def test_replicated_parameters_keep_their_shapes(lab, orig_path):
    model = lab.shard(lab.make(lab.Lin), orig_path, sharding_strategy=S.NO_SHARD)
    shapes = [(4, 3), (4,), (1, 4), (1,)]
    for _ in range(2):
        assert [tuple(p.shape) for p in model.parameters()] == shapes
        lab.loss(model, lab.batch()).backward()
        assert [tuple(p.grad.shape) for p in model.parameters()] == shapes


@quiet
@pytest.mark.world(2)
@pytest.mark.covers("ORIG-04")
@pytest.mark.parametrize("strategy", [S.FULL_SHARD, S.SHARD_GRAD_OP], ids=lambda s: s.name)
def test_what_originals_look_like_after_forward(lab, orig_path, strategy):
    model = lab.shard(lab.make(), orig_path, policy={lab.Block}, sharding_strategy=strategy)
    blocks = lab.units(model)[1:]
    dims = lambda: {p.dim() for unit in blocks for p in unit.handle.originals.params}
    with torch.no_grad():
        model(lab.batch())
    assert dims() == {1}
    output = model(lab.batch())
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert (2 in dims()) == (strategy is S.SHARD_GRAD_OP)
    output.sum().backward()
    assert dims() == {1}


@pytest.mark.world(2)
@pytest.mark.covers("ORIG-05", "ORIG-09", "FRZ-06")
def test_gradients_are_views_of_the_reduced_shard_or_none(lab, orig_path):
    plain = lab.make(lab.Lin)
    plain.a.bias.requires_grad_(False)
    model = lab.shard(plain, orig_path)
    lab.loss(model, lab.batch()).backward()
    handle = lab.units(model)[0].handle
    storage = handle.grads.reduced_S.untyped_storage().data_ptr()
    for index, (fqn, p) in enumerate(zip(handle.fqns, handle.originals.params, strict=True)):
        if fqn == "a.bias" or not handle.originals.present(index):
            assert p.grad is None
        else:
            assert p.grad.shape == p.shape
            assert p.grad.untyped_storage().data_ptr() == storage


@pytest.mark.world(2)
@pytest.mark.covers("ORIG-07", "ORIG-08", "ORIG-12")
def test_clearing_all_or_some_gradients(lab, orig_path):
    model = lab.shard(lab.make(lab.Lin), orig_path)
    lab.loss(model, lab.batch()).backward()
    handle = lab.units(model)[0].handle
    params = dict(zip(handle.fqns, handle.originals.params, strict=True))
    before = lab.grads(model)
    params["a.weight"].grad = None
    got = lab.grads(model)
    assert got["a.weight"] is None or not got["a.weight"].any()
    for name in ("a.bias", "b.weight", "b.bias"):
        assert torch.equal(got[name], before[name])
    for p in params.values():
        p.grad = None
    with torch.no_grad():
        model(lab.batch())
    assert handle.grads.reduced_S is None
    assert all(p.grad is None for p in params.values())
    lab.loss(model, lab.batch()).backward()
    again = lab.grads(model)
    assert all(torch.equal(again[name], before[name]) for name in before)


@pytest.mark.world(2)
@pytest.mark.covers("ORIG-10", "B090", "B152")
@pytest.mark.parametrize("how", ["data", "attribute", "copy"])
@pytest.mark.parametrize("when", ["before any forward", "after a forward", "after a step"])
@pytest.mark.parametrize("strategy", [S.FULL_SHARD, S.SHARD_GRAD_OP], ids=lambda s: s.name)
def test_replaced_parameters_are_written_back(lab, orig_path, how, when, strategy):
    reference = lab.make(lab.Lin)
    model = lab.shard(copy.deepcopy(reference), orig_path, sharding_strategy=strategy)
    inner = model if orig_path == "composable" else model.module
    if when == "after a forward":
        with torch.no_grad():
            model(lab.batch())
    elif when == "after a step":
        lab.loss(model, lab.batch()).backward()
        model.zero_grad()
    with torch.no_grad():
        new = inner.a.weight.detach() * 3
        if how == "data":
            inner.a.weight.data = new
        elif how == "attribute":
            inner.a.weight = nn.Parameter(new)
        else:
            inner.a.weight.copy_(new)
        reference.a.weight.mul_(3)
    torch.testing.assert_close(model(lab.batch()), reference(lab.batch()), **lab.CLOSE)
    lab.loss(model, lab.batch()).backward()
    lab.reference_step(reference, lab.batches())
    lab.assert_grads(model, reference)


@pytest.mark.world(2)
@pytest.mark.covers("ORIG-11", "ORIG-12")
def test_a_wrong_shape_is_refused_on_every_rank(lab, orig_path):
    model = lab.shard(lab.make(lab.Lin), orig_path)
    inner = model if orig_path == "composable" else model.module
    kept = inner.a.weight
    inner.a.weight = nn.Parameter(torch.zeros(kept.numel() + 1, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="Cannot writeback when the parameter shape changes"):
        model(lab.batch())
    inner.a.weight = kept
    lab.loss(model, lab.batch()).backward()
    held = next(p for p in model.parameters() if p.grad is not None)
    held.grad = torch.full_like(held, 7.0)
    handle = lab.units(model)[0].handle
    with torch.no_grad():
        model(lab.batch())
    index = next(i for i, p in enumerate(handle.originals.params) if p is held)
    assert (handle.originals.pieces_of(handle.grads.reduced_S)[index] == 7.0).all()


@pytest.mark.world(2)
@pytest.mark.covers("ORIG-13")
@pytest.mark.parametrize("how", ["data", "attribute"])
def test_changes_between_forward_and_backward_without_resharding(lab, orig_path, how):
    model = lab.shard(lab.make(), orig_path, policy={lab.Block}, sharding_strategy=S.SHARD_GRAD_OP)
    loss = lab.loss(model, lab.batch())
    block = lab.units(model)[1].module
    if how == "data":
        block.lin1.weight.data = torch.ones_like(block.lin1.weight)
    else:
        block.lin1.weight = nn.Parameter(torch.ones_like(block.lin1.weight))
    with pytest.raises(
        AssertionError, match="FSDP does not support changing the parameters between forward and backward"
    ):
        loss.backward()


@pytest.mark.world(2)
@pytest.mark.covers("ORIG-14")
def test_changed_ties_are_refused(lab, orig_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x))

    model = lab.shard(lab.make(Tied), orig_path)
    inner = model if orig_path == "composable" else model.module
    inner.b.weight = nn.Parameter(inner.a.weight.detach() * 2)
    with pytest.raises(NotImplementedError, match="Changing shared parameters is not supported yet"):
        model(lab.batch())


@pytest.mark.world(2)
@pytest.mark.covers("ORIG-15", "ORIG-16", "FLAT-17")
def test_inside_forward_places_show_full_tracked_tensors(lab, path):
    seen = []

    class Looks(lab.Lin):
        def forward(self, x):
            for layer in (self.a, self.b):
                for name in ("weight", "bias"):
                    value = getattr(layer, name)
                    seen.append((tuple(value.shape), isinstance(value, nn.Parameter), value.requires_grad))
            seen.append(sorted(name for name, _ in self.named_parameters()))
            return super().forward(x)

    model = lab.shard(lab.make(Looks), path)
    model(lab.batch()).sum().backward()
    *values, listed = seen
    assert [shape for shape, _, _ in values] == [(4, 3), (4,), (1, 4), (1,)]
    assert not any(is_param for _, is_param, _ in values)
    assert all(tracked for _, _, tracked in values)
    if path != "flat":
        assert listed == ["a.bias", "a.weight", "b.bias", "b.weight"]


@pytest.mark.world(2)
@pytest.mark.covers("ORIG-20", "IGN-02")
def test_partially_ignored_modules_train(lab):
    reference = lab.make(lab.Lin)
    plain = copy.deepcopy(reference)
    model = lab.shard(plain, ignored_states=[plain.a.weight])
    lab.loss(model, lab.batch()).backward()
    lab.reference_step(reference, lab.batches())
    names = {name.replace("_fsdp_wrapped_module.", "") for name, _ in model.named_parameters()}
    assert names == {name for name, _ in reference.named_parameters()}
    got = lab.grads(model)
    local = lab.make(lab.Lin)
    lab.reference_step(local, [lab.batch()])
    want = {n: (local if n == "a.weight" else reference).get_parameter(n).grad for n in got}
    lab.assert_same(got, want)


@pytest.mark.filterwarnings("ignore:.*has both parameters with requires_grad:UserWarning")
@pytest.mark.world(2)
@pytest.mark.covers("ORIG-21", "ORIG-22", "FRZ-08")
@pytest.mark.parametrize("when", ["before", "after"])
def test_freezing_biases(lab, orig_path, when):
    reference = lab.make()
    model = copy.deepcopy(reference)
    objects = [p for n, p in model.named_parameters() if n.endswith("bias")]
    for n, p in reference.named_parameters():
        p.requires_grad_(not n.endswith("bias"))
    if when == "before":
        for p in objects:
            p.requires_grad_(False)
    model = lab.shard(model, orig_path, policy={lab.Block})
    if when == "after":
        for p in objects:
            p.requires_grad_(False)
    optim = torch.optim.Adam(model.parameters(), lr=0.1)
    reference_optim = torch.optim.Adam(reference.parameters(), lr=0.1)
    for step in range(2):
        lab.loss(model, lab.batch(step)).backward()
        optim.step()
        optim.zero_grad()
        lab.reference_step(reference, lab.batches(step), optim=reference_optim)
        lab.assert_params(model, reference)


class Scaled(nn.Module):
    """A unit with a scalar that one rank holds alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.up(x) * self.scale


@pytest.mark.world([2, 3])
def test_data_assigned_to_a_unit_that_stays_gathered_is_noticed_by_ranks_that_hold_none_of_it(trial):
    case = trial("orig", "SHARD_GRAD_OP", lambda: nn.Sequential(Scaled(), Scaled()), policy=ModuleWrapPolicy({Scaled}))
    xs = case.inputs(0)
    case.plain_loss(xs).backward()
    with case.no_sync(True):
        case.loss(xs).backward()
    for model in (case.plain, case.model):
        for name, param in model.named_parameters():
            if name.endswith("scale"):
                param.data = param.data * 2
    case.both_backward(1)
    case.step()
    case.compare()


@quiet
@pytest.mark.world([2, 3])
@pytest.mark.parametrize("evaluated_before", [False, True], ids=["trained before", "evaluated before"])
def test_data_put_aside_for_an_evaluation_comes_back_as_it_was(trial, api, strategy, evaluated_before):
    """An average is evaluated in place of the weights: what the user put aside must not become the average."""
    case = trial(api, strategy)
    case.both_backward(0)
    case.step()
    for _ in range(2):
        if evaluated_before:  # without gradients some strategies show full parameters afterwards
            case.zero_grad()
            with torch.no_grad():
                case.loss(case.inputs(1))
        for model in (case.plain, case.model):
            kept = [param.data for param in model.parameters()]
            for param in model.parameters():
                param.data = param.data * 0.5
            with torch.no_grad():
                (case.plain_loss if model is case.plain else case.loss)(case.inputs(1))
            for param, data in zip(model.parameters(), kept, strict=True):
                param.data = data
        case.both_backward(2)
        case.step()
    case.compare()
