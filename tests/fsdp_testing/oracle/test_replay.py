"""The oracle itself, compared with training loops that are written out here, without any of its code."""

from __future__ import annotations

import pytest
import torch

from fsdp_testing.cases.models import MODELS, loss_of
from fsdp_testing.cases.records import (
    Batch,
    Case,
    Clip,
    EditFullParameters,
    Forward,
    ForwardBackward,
    Freeze,
    MixedPrecisionSpec,
    ModelSpec,
    Observe,
    OptimizerSpec,
    SetLr,
    Step,
    Thaw,
    WorldSpec,
    ZeroGrad,
)
from fsdp_testing.errors import HarnessError
from fsdp_testing.oracle import models, optimizers, oracle
from fsdp_testing.oracle.assemble import GatheredState
from fsdp_testing.oracle.disturbance import Disturbance
from fsdp_testing.oracle.quantities import Quantity
from fsdp_testing.oracle.replay import Replay

ADAM = OptimizerSpec("adamw", {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.1})


def case(*program, model="mlp", size=3, **fields):
    dtype = fields.pop("dtype", "float64")
    return Case(ModelSpec(model, dtype=dtype), WorldSpec(size), tuple(program), seed=5, **fields)


def micro(seed, **batch):
    return ForwardBackward(Batch(seed, **batch))


def local(seed):
    return ForwardBackward(Batch(seed), no_sync=True)


def held(replay, kind="value"):
    point = replay.points[-1]
    return {quantity.name: value for quantity, value in point.values.items() if quantity.kind == kind}


def mean_loss(model, one, seed):
    """The mean over ranks of the ranks' own losses: one graph, one backward."""
    losses = []
    for rank in range(one.world.size):
        inputs = models.make_inputs(one, Batch(seed), rank)
        losses.append(loss_of(model(*inputs.args, **inputs.kwargs)))
    return torch.stack(losses).mean()


def assert_close(found, parameters):
    for name, parameter in parameters:
        torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("model", ["mlp", "deep_nest", "uneven", "tied_within", "called_twice"])
@pytest.mark.parametrize("optimizer", [OptimizerSpec("sgd", {"lr": 0.05, "momentum": 0.9}), ADAM])
def test_training_equals_a_loop_over_the_mean_of_losses(model, optimizer):
    one = case(*[op for seed in range(3) for op in (micro(seed), Step(), ZeroGrad())], model=model, optimizer=optimizer)
    replay = Replay(one)
    replay.run()
    plain = models.build_model(one)
    steps = optimizers.build_optimizer(one, plain.parameters())
    for seed in range(3):
        mean_loss(plain, one, seed).backward()
        steps.step()
        steps.zero_grad()
    assert_close(held(replay), plain.named_parameters())


def test_local_micro_batches_count_like_reduced_ones():
    one = case(local(0), local(1), micro(2), Observe(), Step())
    replay = Replay(one)
    replay.run()
    plain = models.build_model(one)
    for seed in range(3):
        mean_loss(plain, one, seed).backward()
    assert_close(held(replay, "gradient"), [(name, p.grad) for name, p in plain.named_parameters()])


def test_pending_gradients_are_not_told():
    replay = Replay(case(local(0), Observe(), micro(1), Observe()))
    replay.run()
    assert [point.pending for point in replay.points if point.snapshot] == [True, False, False]
    assert not any(quantity.kind == "gradient" for quantity in replay.points[1].values)


def test_gradients_that_no_backward_can_reduce_are_not_judged():
    """The synchronising micro-batch uses frozen parameters alone, so it has no backward: what no_sync left stays."""
    branch = {"kind": "group", "name": "b", "branch": 0, "nodes": [{"kind": "linear", "name": "c", "out": 2}]}
    tree = {"width": 2, "nodes": [branch, {"kind": "linear", "name": "last", "out": 2}]}
    program = (Freeze(("last.*",)), local(1), micro(2, usage=((False, False, False),)))
    one = Case(ModelSpec("tree", dtype="float64", tree=tree), WorldSpec(2), program)
    with pytest.raises(HarnessError, match="expected a backward after no_sync"):
        Replay(one).run()


def test_clipping_is_torchs_own_on_whole_gradients():
    one = case(micro(0), Clip(0.1, 1.0), Observe())
    replay = Replay(one)
    replay.run()
    plain = models.build_model(one)
    mean_loss(plain, one, 0).backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1, 1.0)
    assert_close(held(replay, "gradient"), [(name, p.grad) for name, p in plain.named_parameters()])
    assert_close({"n": replay.points[1].values[Quantity("result", "total_norm", "", 2)]}, [("n", norm)])


def test_each_rank_has_buffers_of_its_own():
    one = case(micro(0), Forward(Batch(1), "eval"), micro(2), model="batch_norm", size=2)
    replay = Replay(one)
    replay.run()
    for rank in range(2):
        plain = models.build_model(one)
        for seed, training in ((0, True), (1, False), (2, True)):
            plain.train(training)
            inputs = models.make_inputs(one, Batch(seed), rank)
            plain(*inputs.args, **inputs.kwargs)
        for name, buffer in plain.named_buffers():
            found = replay.points[-1].values[Quantity("buffer", name, "", rank)]
            torch.testing.assert_close(found, buffer, rtol=1e-12, atol=1e-13)


def test_what_no_rank_used_has_no_gradient_and_what_one_used_has():
    masks = ((True, False, False), (True, True, False))
    replay = Replay(case(micro(0, usage=masks), model="conditional", size=2))
    replay.run()
    gradients = held(replay, "gradient")
    assert gradients["branches.0.weight"] is not None
    assert gradients["branches.1.weight"] is not None
    assert gradients["branches.2.weight"] is None
    assert gradients["never.bias"] is None


def test_a_rank_that_did_not_use_a_parameter_counts_with_zeros():
    masks = ((True, True, True), (False, False, False))
    both = Replay(case(micro(0, usage=masks), model="conditional", size=2))
    both.run()
    plain = models.build_model(both.case)
    inputs = models.make_inputs(both.case, Batch(0, usage=masks), 0)
    loss_of(plain(*inputs.args, **inputs.kwargs)).backward()
    expected = dict(plain.named_parameters())["branches.1.weight"].grad
    torch.testing.assert_close(held(both, "gradient")["branches.1.weight"], expected / 2, rtol=1e-13, atol=0)


def test_freezing_thawing_rates_and_edits():
    program = (
        Freeze(("layers.0.*",)), micro(0), Observe("frozen"), Step(), ZeroGrad(), Thaw(("*",)), micro(1), SetLr(0.0),
        Observe("thawed"), Step(), EditFullParameters(("*.bias",), 2.0),
        EditFullParameters(("*",), 3.0, writeback=False),
    )  # fmt: skip
    replay = Replay(case(*program))
    replay.run()
    marked = [point for point in replay.points if point.snapshot]
    frozen, thawed, end = marked
    assert frozen.values[Quantity("gradient", "layers.0.weight")] is None
    assert frozen.requires_grad["layers.0.weight"] is False
    assert thawed.values[Quantity("gradient", "layers.0.weight")] is not None
    weight, bias = Quantity("value", "layers.1.weight"), Quantity("value", "layers.1.bias")
    assert torch.equal(end.values[weight], thawed.values[weight])
    assert torch.equal(end.values[bias], thawed.values[bias] * 2)


def test_zero_grad_in_both_forms():
    replay = Replay(case(micro(0), ZeroGrad(False), Observe(), ZeroGrad(True), Observe()))
    replay.run()
    zeros, none = [point for point in replay.points if point.snapshot][:2]
    assert not zeros.values[Quantity("gradient", "layers.0.bias")].any()
    assert none.values[Quantity("gradient", "layers.0.bias")] is None


@pytest.mark.parametrize(
    "precision", [("bfloat16", None), ("bfloat16", "float32"), (None, "bfloat16"), ("float16", None)]
)
def test_low_precision_casts_at_each_place(precision):
    one = case(micro(0), size=2, dtype="float32", mixed_precision=MixedPrecisionSpec(*precision))
    replay = Replay(one)
    replay.run()
    compute = models.dtype_of(precision[0]) if precision[0] else torch.float32
    wire = models.dtype_of(precision[1]) if precision[1] else compute
    parts = []
    for rank in range(2):
        plain = models.build_model(one).to(compute)
        (x,), _ = models.make_inputs(one, Batch(0), rank)
        loss_of(plain(x.to(compute))).backward()
        parts.append({name: p.grad.to(wire) for name, p in plain.named_parameters()})
    for name, found in held(replay, "gradient").items():
        assert found.dtype == torch.float32
        assert torch.equal(found, ((parts[0][name] + parts[1][name]) / 2).float())
    assert all(value.dtype == torch.float32 for value in held(replay).values())


def test_what_a_forward_in_low_precision_leaves_alone_keeps_its_digits():
    one = case(micro(0), model="self_clipping", size=2, dtype="float32", mixed_precision=MixedPrecisionSpec("bfloat16"))
    replay = Replay(one)
    before = {name: parameter.detach().clone() for name, parameter in replay.parameters.items()}
    replay.run()
    for name, value in held(replay).items():
        edited = before[name].abs() > 0.2 if name.endswith("weight") else torch.zeros_like(value, dtype=torch.bool)
        assert torch.equal(value[~edited], before[name][~edited])
        assert torch.equal(value[edited].abs(), torch.full_like(value[edited], 0.2).bfloat16().float())


def test_buffers_are_held_in_their_dtype():
    precision = MixedPrecisionSpec(buffer_dtype="bfloat16")
    replay = Replay(case(micro(0), model="buffers", dtype="float32", mixed_precision=precision))
    replay.run()
    buffers = {q.name: value for q, value in replay.points[-1].values.items() if q.kind == "buffer"}
    assert buffers["first.offset"].dtype == torch.bfloat16
    assert buffers["first.count"].dtype == torch.int64
    assert buffers["plain.mask"].dtype == torch.bool


def test_a_replay_is_the_same_every_time():
    one = case(micro(0), Step(), Clip(1.0), micro(1), model="gpt")
    first, second = Replay(one), Replay(one)
    first.run()
    second.run()
    for left, right in zip(first.points, second.points):
        for quantity, value in left.values.items():
            other = right.values[quantity]
            assert (value is None and other is None) or torch.equal(value, other)


def test_the_model_is_left_as_it_was_built():
    one = case(micro(0), Step())
    before = models.build_model(one).state_dict()
    Replay(one).run()
    for name, value in models.build_model(one).state_dict().items():
        assert torch.equal(value, before[name])


class TestLockstep:
    def test_it_goes_on_from_the_adopted_state(self):
        one = case(micro(0), Step(), micro(1), size=2)
        other = {name: value + 1 for name, value in models.build_model(one).state_dict().items()}
        gradients = dict.fromkeys(other)
        state = GatheredState(other, gradients, None, ({}, {}))
        replay = Replay(one, adopted={0: state, 1: state, 2: state})
        replay.run(observe_all=True)
        plain = models.build_model(one)
        plain.load_state_dict(other)
        mean_loss(plain, one, 1).backward()
        found = next(point for point in replay.points if point.snapshot and point.index == 2).values
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(found[Quantity("gradient", name)], parameter.grad, rtol=1e-13, atol=0)

    def test_it_ends_where_the_implementation_ended(self):
        replay = Replay(case(micro(0), Step(), micro(1)), adopted={})
        replay.run(observe_all=True)
        assert {point.index for point in replay.points} == {0}

    def test_two_ranks_are_bitwise_and_three_are_bounded(self):
        for size, exact in ((1, True), (2, True), (3, False)):
            expectation = oracle.expect_lockstep(case(micro(0), size=size), None, {})
            state = expectation.points[1]
            bounds = [e.bound for q, e in state.quantities.items() if q.kind == "gradient"]
            assert all(bool((torch.as_tensor(bound) == 0).all()) == exact for bound in bounds)

    def test_the_bound_is_that_of_the_sum_in_any_order(self):
        one = case(micro(0), size=3, dtype="float32", mixed_precision=MixedPrecisionSpec(None, "bfloat16"))
        expectation = oracle.expect_lockstep(one, None, {})
        parts = []
        for rank in range(3):
            plain = models.build_model(one)
            inputs = models.make_inputs(one, Batch(0), rank)
            loss_of(plain(*inputs.args)).backward()
            parts.append({name: p.grad.bfloat16() for name, p in plain.named_parameters()})
        for name in parts[0]:
            expected = expectation.points[1].quantities[Quantity("gradient", name)]
            for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
                a, b, c = (parts[rank][name] for rank in order)
                for mean in (((a + b) + c) / 3, (a / 3 + b / 3) + c / 3):
                    assert bool(((mean.float() - expected.value).abs() <= expected.bound).all())


class TestFreeBounds:
    def test_they_hold_sums_in_another_order_and_stay_tiny(self):
        program = [op for seed in range(3) for op in (local(2 * seed), micro(2 * seed + 1), Step(), ZeroGrad())]
        one = case(*program, optimizer=ADAM)
        expectation = oracle.expect_free(one)
        plain = models.build_model(one)
        steps = optimizers.build_optimizer(one, plain.parameters())
        for seed in range(3):
            (mean_loss(plain, one, 2 * seed + 1) + mean_loss(plain, one, 2 * seed)).backward()
            steps.step()
            steps.zero_grad()
        for name, parameter in plain.named_parameters():
            expected = expectation.points[-1].quantities[Quantity("value", name)]
            assert float((parameter.detach() - expected.value).abs().max()) <= expected.bound
            assert 0 < expected.bound < 1e-11

    def test_a_real_error_of_a_millionth_lies_far_beyond(self):
        one = case(micro(0), Step(), size=2)
        for point in oracle.expect_free(one).points:
            for quantity, expected in point.quantities.items():
                if quantity.kind == "gradient":
                    assert expected.bound < 1e-6 * float(expected.value.abs().max()) / 1000

    def test_exact_zeros_stay(self):
        gradient = torch.tensor([0.0, 1.0])
        moved = Disturbance(1, 100).gradient(gradient, gradient.abs(), 1.0)
        assert moved[0] == 0.0
        assert moved[1] != 1.0
        assert torch.equal(Disturbance(1, 0).gradient(gradient, gradient, 1.0), gradient)

    def test_roundings_grow_with_what_is_added_up(self):
        few, many = case(micro(0), size=2), case(micro(0), micro(1), micro(2, rows=(64,)), size=8)
        assert oracle.roundings_of(few) < oracle.roundings_of(many)


def test_every_zoo_model_replays():
    for name, model in MODELS.items():
        replay = Replay(case(micro(0), Step(), model=name, size=2))
        replay.run()
        assert held(replay), model.summary


class TestDisplacement:
    def test_the_same_numbers_lie_elsewhere(self):
        one = case(micro(0), Step(), micro(1), size=2)
        moved = Replay(one, disturbance=Disturbance(0, 0, displaced=True))
        plain = Replay(one)
        for fqn, parameter in moved.compute.items():
            assert parameter.data_ptr() % 64
            assert torch.equal(parameter, plain.compute[fqn])
        moved.run()
        plain.run()
        found = held(moved, "gradient")
        for fqn, gradient in held(plain, "gradient").items():
            torch.testing.assert_close(found[fqn], gradient, rtol=1e-13, atol=1e-14)

    def test_no_parameter_lies_where_products_read_four_numbers_at_once(self):
        disturbance = Disturbance(0, 0, displaced=True)
        placed = [disturbance.place(torch.ones(8)) for _ in range(16)]
        assert all(values.data_ptr() % 16 for values in placed)
        assert len({values.data_ptr() % 64 for values in placed}) > 2

    def test_what_depends_on_the_place_is_allowed_for(self, monkeypatch):
        one = case(micro(0), size=2)
        true = Replay.local_gradients

        def sensitive(self, rank, batch):
            forwarded, gradients = true(self, rank, batch)
            if self.disturbance.displaced:
                gradients.values["layers.0.bias"] = gradients.values["layers.0.bias"] + 1e-16
            return forwarded, gradients

        bias, weight = Quantity("gradient", "layers.0.bias"), Quantity("gradient", "layers.0.weight")
        before = oracle.expect_lockstep(one, None, {}).points[1].quantities
        monkeypatch.setattr(Replay, "local_gradients", sensitive)
        after = oracle.expect_lockstep(one, None, {}).points[1].quantities
        assert float(torch.as_tensor(before[bias].bound).max()) == 0.0
        assert 1e-16 < float(torch.as_tensor(after[bias].bound).max()) < 1e-15
        assert "place in memory" in after[bias].derivation
        once = oracle.expect_lockstep(one, None, {}, displaced=False).points[1].quantities
        assert float(torch.as_tensor(once[bias].bound).max()) == 0.0
        assert float(torch.as_tensor(after[weight].bound).max()) == 0.0


@pytest.mark.parametrize(
    ("strategy", "size", "low"),
    [("full_shard", 2, False), ("shard_grad_op", 2, False), ("no_shard", 2, True), ("full_shard", 1, True)],
)
def test_only_replicated_gradients_may_be_reduced_again_with_what_they_held(strategy, size, low):
    precision = MixedPrecisionSpec("bfloat16")
    one = case(micro(0), micro(1), size=size, dtype="float32", strategy=strategy, mixed_precision=precision)
    replay = Replay(one)
    replay.run(observe_all=True)
    second = replay.points[3]
    assert second.index == 1
    quantity = Quantity("gradient", "layers.0.weight")
    bound, _ = second.slack[quantity]
    relative = float((bound / second.values[quantity].abs().clamp_min(1e-3)).median())
    assert (relative > 2**-9) == low
