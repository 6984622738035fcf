"""A state passes through one process: what it loads it trains, and what it saved the ranks go on with."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from fsdp_testing.cases.records import (
    Batch,
    Case,
    ForwardBackward,
    ModelSpec,
    OptimizerSpec,
    Reload,
    Step,
    Verdict,
    WorldSpec,
    WrappingPlan,
)
from fsdp_testing.errors import InvalidRecord
from fsdp_testing.judging.batch import Watch
from fsdp_testing.judging.case_runner import CaseRunner
from fsdp_testing.oracle import models, one_process, optimizers
from fsdp_testing.oracle.replay import Replay
from fsdp_testing.ranks.pool import default_pool

MICRO = ForwardBackward(Batch(1))
ADAMW = OptimizerSpec("adamw", {"lr": 0.01})
THROUGH = Reload(through=Batch(5))


def case(*program, optimizer=ADAMW, model="mlp", size=2):
    units = ("layers.0",) if model == "mlp" else ()
    return Case(
        ModelSpec(model), WorldSpec(size), tuple(program), 0, WrappingPlan(units), "full_shard", optimizer=optimizer
    )


def trained(one, steps=2):
    """A model of one process after some steps, with its state by name."""
    module = models.build_model(one)
    optimizer = optimizers.build_optimizer(one, module.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        batch = Batch(step)
        models.forward(module, one, batch, 0, models.make_inputs(one, batch, 0)).loss.backward()
        optimizer.step()
    state = {name: optimizer.state[parameter] for name, parameter in module.named_parameters()}
    return module, optimizer, {"state": state, "param_groups": [{"lr": 0.01, "params": ["anything"]}]}


class TestTrainOn:
    def test_it_goes_on_as_if_nothing_had_been_saved(self):
        one = case(MICRO)
        module, _, saved = trained(one)
        carried = one_process.Saved(copy.deepcopy(module.state_dict()), copy.deepcopy(saved))
        got = one_process.train_on(one, Batch(2), carried, {}, steps=True)
        expected, optimizer, _ = trained(one, steps=3)
        assert all(torch.equal(got.model[name], value) for name, value in expected.state_dict().items())
        for name, parameter in expected.named_parameters():
            for key, value in optimizer.state[parameter].items():
                assert torch.equal(got.optimizer["state"][name][key], value)
        assert got.optimizer["param_groups"] == saved["param_groups"]

    def test_modules_do_not_convert_what_has_lost_their_version(self):
        one = case(MICRO, model="versioned")
        module = models.build_model(one)
        got = one_process.train_on(one, Batch(2), one_process.Saved(dict(module.state_dict()), None), {}, steps=False)
        assert all(torch.equal(got.model[name], value) for name, value in module.state_dict().items())
        again = models.build_model(replace(one, seed=5))
        again.load_state_dict(got.model)
        assert all(torch.equal(value, again.state_dict()[name]) for name, value in module.state_dict().items())

    def test_a_fresh_optimizer_steps_where_none_was_saved(self):
        one = case(MICRO)
        module, _, _ = trained(one)
        carried = one_process.Saved(copy.deepcopy(module.state_dict()), None)
        got = one_process.train_on(one, Batch(2), carried, {}, steps=True)
        assert got.optimizer is None
        assert not torch.equal(got.model["layers.0.weight"], module.layers[0].weight)
        same = one_process.train_on(one, Batch(2), carried, {}, steps=False)
        assert torch.equal(same.model["layers.0.weight"], module.layers[0].weight)

    def test_what_is_frozen_does_not_move(self):
        one = case(MICRO, optimizer=OptimizerSpec("sgd", {"lr": 0.1}))
        module = models.build_model(one)
        flags = {name: name != "layers.0.weight" for name, _ in module.named_parameters()}
        carried = one_process.Saved(copy.deepcopy(module.state_dict()), None)
        got = one_process.train_on(one, Batch(2), carried, flags, steps=True)
        assert torch.equal(got.model["layers.0.weight"], module.layers[0].weight)
        assert not torch.equal(got.model["layers.0.bias"], module.layers[0].bias)

    def test_the_learning_rate_is_the_saved_one(self):
        one = case(MICRO, optimizer=OptimizerSpec("sgd", {"lr": 0.1}))
        module = models.build_model(one)
        carried = one_process.Saved(copy.deepcopy(module.state_dict()), {"state": {}, "param_groups": [{"lr": 0.0}]})
        got = one_process.train_on(one, Batch(2), carried, {}, steps=True)
        assert all(torch.equal(got.model[name], value) for name, value in module.state_dict().items())

    def test_a_state_that_one_process_cannot_load_is_the_implementations_fault(self):
        one = case(MICRO)
        state = models.build_model(one).state_dict()
        state.pop("layers.0.weight")
        with pytest.raises(RuntimeError, match=r"layers\.0\.weight"):
            one_process.train_on(one, Batch(2), one_process.Saved(state, None), {}, steps=True)


def test_the_oracle_steps_on_the_inputs_of_one_rank():
    one = case(MICRO, Step(), THROUGH)
    replay = Replay(one)
    replay.run()
    apart = Replay(replace(one, program=(MICRO, Step(), ForwardBackward(Batch(5)), Step())))
    apart.run()
    weight = replay.parameters["layers.0.weight"]
    assert replay.optimizer.state[weight]["step"] == 2
    assert weight.grad is None
    assert not torch.equal(weight, apart.parameters["layers.0.weight"])
    alone = Replay(replace(one, program=(MICRO, Step(), Reload())))
    alone.run()
    _, gradients = alone.local_gradients(0, Batch(5))
    for fqn, parameter in alone.parameters.items():
        parameter.grad = gradients.values[fqn].clone()
    alone.optimizer.step()
    assert all(torch.equal(replay.parameters[fqn], p) for fqn, p in alone.parameters.items())


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("fsdp_ref-wrapper", False), ("torch-fsdp1", True), ("torch-fsdp2", True)],
)
def test_ranks_go_on_with_what_one_process_saved(name, optimizer):
    reload = replace(THROUGH, optimizer=optimizer)
    cases = [case(MICRO, Step(), reload, MICRO, Step(), size=3)]
    found = CaseRunner(default_pool()).judge_batch(name, cases, Watch(operations=True))
    assert found[0].verdict is Verdict.PASS, found[0].judgement.why


def test_only_a_full_state_passes_through_one_process():
    with pytest.raises(InvalidRecord, match="through"):
        Reload("sharded", through=Batch(1))
    written = case(MICRO, THROUGH)
    assert Case.from_json(written.to_json()) == written
