"""What cases share: a replay in lockstep those whose ranks were in the same states, to the bit; of a model its numbers only."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fsdp_testing.adapters.protocol import Division
from fsdp_testing.cases.records import CAPABILITIES, Case
from fsdp_testing.judging import batch_judge
from fsdp_testing.oracle import models, oracle
from fsdp_testing.oracle.assemble import GatheredState
from fsdp_testing.oracle.quantities import Expectation
from fsdp_testing.oracle.replay import Replay
from fsdp_testing.oracle.setup import oracle_view
from fsdp_testing.search.certificate.axes import EVERY_RANK, Cell
from fsdp_testing.search.certificate.cases import case_of

ALL = frozenset(CAPABILITIES)


def cell(strategy: str, mesh: str, units: str = "root", first: str = "NS") -> Case:
    low = "bfloat16, reduced in float32"
    return case_of(Cell(strategy, mesh, units, "called twice", first, "S", EVERY_RANK, "not at all", low), ALL)


def states_of(case: Case) -> dict[int, GatheredState]:
    """What an implementation that does as the oracle does holds after each operation."""
    found = {}
    for point in Replay(case).run(observe_all=True):
        if point.snapshot:
            kinds = ("value", "gradient")
            values, gradients = ({q.name: v for q, v in point.values.items() if q.kind == kind} for kind in kinds)
            found[point.index] = GatheredState(values, gradients, None, ())  # type: ignore[arg-type]  # values are there
    return found


def shared(case: Case, states: dict[int, GatheredState], division: Division | None = None) -> Expectation:
    return batch_judge._undisplaced(case, division, states)


def numbers(expectation: Expectation) -> list[object]:
    return [
        (point.index, point.pending, point.dtypes, quantity, expected.derivation)
        + ((None,) if expected.value is None else (expected.value.tolist(), torch.as_tensor(expected.bound).tolist()))
        for point in expectation.points
        for quantity, expected in point.quantities.items()
    ]


@pytest.mark.parametrize("strategy_and_mesh", [("full_shard", "2"), ("no_shard", "2"), ("hybrid_shard", "2x1")])
def test_what_is_shared_is_what_the_case_itself_gives(strategy_and_mesh: tuple[str, str]):
    case = cell(*strategy_and_mesh, units="root and two nested")
    states = states_of(case)
    own = oracle.expect_lockstep(case, None, states, displaced=False)
    assert numbers(shared(case, states)) == numbers(own)
    assert len(own.points) > 4


def test_strategies_and_units_share_but_not_with_replicated_gradients():
    states = states_of(cell("full_shard", "2"))
    first = shared(cell("full_shard", "2"), states)
    again = {index: replace(state, values=dict(state.values)) for index, state in states.items()}
    assert shared(cell("shard_grad_op", "2", units="root and outer"), again) is first
    assert shared(cell("hybrid_shard", "1x2"), again) is first
    replicated = shared(cell("no_shard", "2"), states)
    assert replicated is not first
    assert shared(cell("hybrid_shard", "2x1"), states) is replicated
    assert numbers(replicated) != numbers(first), "bounds of what was accumulated are wider there"


def test_other_states_divisions_and_schedules_are_replayed_anew():
    case = cell("full_shard", "2")
    states = states_of(case)
    first = shared(case, states)
    name, value = next(iter(states[0].values.items()))
    one_bit = torch.nextafter(value, torch.full_like(value, torch.inf))
    other = {**states, 0: replace(states[0], values={**states[0].values, name: one_bit})}
    assert shared(case, other) is not first
    cleared = replace(states[1], gradients=dict.fromkeys(states[1].gradients))
    assert shared(case, {**states, 1: cleared}) is not first
    assert shared(case, states, Division(before=2.0, after=1.0)) is not first
    assert shared(cell("full_shard", "2", first="SS"), states) is not first
    assert shared(case, states) is first


def test_a_model_that_is_built_again_shares_nothing_with_the_one_before():
    case = cell("full_shard", "2")
    one, other = models.build_model(case), models.build_model(case)
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.fill_(7.0)
            parameter.requires_grad_(False)
    del one.outer
    third = models.build_model(case)
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter, third.get_parameter(name)), name
        assert parameter.requires_grad
        assert third.get_parameter(name).requires_grad
        assert parameter.data_ptr() != third.get_parameter(name).data_ptr()
    frozen = models.build_model(replace(case, model=replace(case.model, freeze=("*bias",))))
    assert [p.requires_grad for p in frozen.parameters()] == [n.endswith("weight") for n, _ in other.named_parameters()]
    assert not torch.equal(next(models.build_model(replace(case, seed=1)).parameters()), next(other.parameters()))


def test_a_setting_that_one_process_is_told_of_has_replays_of_its_own():
    """A replay of the same program, shared, expected of every rank what rank 0 alone saves: right implementations failed."""
    plain = cell("full_shard", "1")
    with_setting = lambda name: replace(plain, wrapping=replace(plain.wrapping, settings=(name,)))
    assert oracle_view(with_setting("small_buckets")) == oracle_view(plain)
    for name in ("saved_on_rank_0", "full_outputs", "unit_precisions"):
        assert oracle_view(with_setting(name)) != oracle_view(plain)
