"""A state that some ranks train in between: in the oracle, on every path of the reference, and the check can fail."""

from __future__ import annotations

import pytest
import torch
from fuzz_cases import case, micro

from fsdp_testing.cases.drawing.normal_form import legal_case
from fsdp_testing.cases.operations import Batch, Observe, Reload, Step, TrainElsewhere
from fsdp_testing.cases.records import UNIT_ROUNDOFF, OptimizerSpec, WorldSpec
from fsdp_testing.checks.suites.check import ADAMW
from fsdp_testing.judging.batch import Watch
from fsdp_testing.judging.case_runner import CaseRunner
from fsdp_testing.oracle.replay import Replay
from fsdp_testing.ranks.pool import default_pool

LAYERS = tuple({"kind": "linear", "name": name, "out": out} for name, out in (("a", 5), ("b", 3)))
THREE = {"world": WorldSpec(3), "nodes": LAYERS, "optimizer": ADAMW, "strategy": "full_shard"}


def program(*elsewhere):
    return micro(1), Step(), *elsewhere, Observe(), micro(2), Step()


def here_and_there(*, strategies=("full_shard",), units=((),)):
    return [
        case(*program(TrainElsewhere(Batch(7), ranks, last, plan, strategy)), **THREE)
        for ranks in (1, 2)
        for last in (False, True)
        for strategy, plan in zip(strategies, units)
    ]


def test_one_rank_is_one_process():
    elsewhere, through = Batch(7, (3,)), Reload(through=Batch(7, (3,)))
    one, other = (
        Replay(case(*program(operation), nodes=LAYERS, optimizer=ADAMW)).run()[-1].values
        for operation in (TrainElsewhere(elsewhere), through)
    )
    assert all(torch.equal(value, other[quantity]) for quantity, value in one.items() if value is not None)


def test_the_mean_of_the_ranks_that_train():
    def first_values(ranks):
        plain = case(
            TrainElsewhere(Batch(7), ranks), Observe(), nodes=LAYERS, optimizer=OptimizerSpec("sgd", {"lr": 1.0})
        )
        return Replay(plain).run()[0].values

    before = {fqn: p.detach() for fqn, p in Replay(case(nodes=LAYERS)).parameters.items()}
    alone = Replay(case(nodes=LAYERS))
    gradients = [alone.local_gradients(rank, Batch(7))[1].values for rank in range(2)]
    for quantity, value in first_values(2).items():
        if quantity.kind == "value":
            mean = sum(g[quantity.fqn] for g in gradients) / 2
            # Sum, division, product with the learning rate and difference round once each, here and there.
            largest = max(
                float(each.abs().max()) for each in (before[quantity.fqn], *(g[quantity.fqn] for g in gradients))
            )
            due = before[quantity.fqn] - mean
            torch.testing.assert_close(value, due, rtol=0, atol=2 * 4 * UNIT_ROUNDOFF["float64"] * largest)


def test_there_are_other_ranks_and_a_legal_plan():
    wide = TrainElsewhere(Batch(7), 3, units=("a", "nowhere"))
    (legal,) = legal_case(case(wide, nodes=LAYERS)).program
    assert legal == TrainElsewhere(Batch(7), 1, units=("a",))
    assert legal_case(case(wide, nodes=LAYERS, world=WorldSpec(1))).program == ()


@pytest.mark.parametrize("name", ["fsdp_ref-wrapper", "fsdp_ref-composable"])
def test_the_reference_passes(name):
    through = case(*program(TrainElsewhere(Batch(7), 2, True, ("a",), "shard_grad_op", directory=True)), **THREE)
    plans = {"strategies": ("full_shard", "shard_grad_op", "no_shard"), "units": (None, ("a",), ("a", "b"))}
    found = CaseRunner(default_pool()).judge_batch(name, [through, *here_and_there(**plans)], Watch(models=True))
    assert [result.verdict.value for result in found] == ["pass"] * 13, [result.judgement.why for result in found]


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_the_reference_saves_a_scalar_where_each_shard_group_is_one_rank(strategy):
    nodes = ({"kind": "scale", "shape": "scalar", "name": "a"}, {"kind": "linear", "name": "b", "out": 3})
    elsewhere = TrainElsewhere(Batch(7), 1, True, None, strategy, directory=True)
    hybrid = {"world": WorldSpec(2, mesh=(2, 1)), "strategy": "hybrid_shard_zero2", "optimizer": ADAMW}
    answer = CaseRunner(default_pool()).judge("fsdp_ref-composable", case(*program(elsewhere), nodes=nodes, **hybrid))
    assert answer.verdict.value == "pass", answer.judgement.why


@pytest.mark.parametrize("fault", ["LastShardLost", "MomentsByPlace"])
def test_what_is_lost_on_the_way_is_seen(fault):
    cases = [case(*program(Reload()), **THREE), *here_and_there(units=(None,))]
    found = CaseRunner(default_pool()).judge_batch(f"faults_saving:{fault}", cases, Watch())
    assert [result.verdict.value for result in found] == ["pass", *["fail"] * 4], [r.judgement.why for r in found]


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_they_step_is_clipped_by_the_norm_of_their_own_mean(ranks):
    def moved(max_norm):
        elsewhere = TrainElsewhere(Batch(7), ranks, max_norm=max_norm)
        replay = Replay(case(elsewhere, nodes=LAYERS, optimizer=OptimizerSpec("sgd", {"lr": 1.0})))
        before = {fqn: parameter.detach().clone() for fqn, parameter in replay.parameters.items()}
        replay.run()
        return torch.cat([(before[fqn] - parameter.detach()).flatten() for fqn, parameter in replay.parameters.items()])

    free, clipped = moved(None), moved(0.25)
    assert free.norm() > 0.25
    torch.testing.assert_close(clipped, free * (0.25 / (free.norm() + 1e-6)), rtol=1e-12, atol=1e-15)
