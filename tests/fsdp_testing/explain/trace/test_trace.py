"""Traces of real runs on two ranks: what torch's implementations do with one unit is known by hand."""

from __future__ import annotations

import pytest

from fsdp_testing.cases.records import Batch, Case, ForwardBackward, ModelSpec, Step, WorldSpec, WrappingPlan, ZeroGrad
from fsdp_testing.errors import InvalidArgument, WorldFailed
from fsdp_testing.explain.trace.order_parity import compare_case, parity_cases, parity_program
from fsdp_testing.explain.trace.run import trace
from fsdp_testing.judging.checkers.event_order import collective_steps, ranks_agree, transition_steps
from fsdp_testing.judging.checkers.event_rules import check_lifecycle, unsharded_before

MEMORY = frozenset({"gather", "free"})


def one_iteration(**more: object) -> Case:
    program = (ForwardBackward(Batch(1)), Step(), ZeroGrad())
    return Case(model=ModelSpec("mlp"), world=WorldSpec(2), program=program, **more)  # type: ignore[arg-type]  # test shorthand


@pytest.mark.parametrize("name", ["torch-fsdp1", "torch-fsdp2"])
def test_one_unit_is_gathered_reduced_and_freed_once(name: str) -> None:
    found = trace(name, one_iteration())
    for rank in (0, 1):
        assert transition_steps(found.history, rank, MEMORY) == ("— operation 0", "gather (root)", "free (root)")
        kinds = [step.partition(" ")[0] for step in collective_steps(found.history, rank)]
        assert kinds == ["all_gather", "reduce_scatter(sum)"]
    assert check_lifecycle(found.history) == ()
    assert unsharded_before(found.history, 10**6) == {}
    assert ranks_agree(found.history) == ""


@pytest.mark.parametrize("name", ["torch-fsdp1", "torch-fsdp2"])
def test_units_are_told_with_their_parameters(name: str) -> None:
    found = trace(name, one_iteration(wrapping=WrappingPlan(units=("layers.1",))))
    units = dict(found.units[0])
    assert units["layers.1"] == ("layers.1.weight", "layers.1.bias")
    assert "layers.0.weight" in units[""]


def test_ddp_reduces_through_cpp_and_is_seen() -> None:
    found = trace("torch-ddp", one_iteration(strategy="no_shard"))
    assert any(step.startswith("all_reduce(sum)") for step in collective_steps(found.history, 0))


def test_a_case_that_fails_has_no_trace() -> None:
    with pytest.raises(WorldFailed, match="torch-ddp"):
        trace("torch-ddp", one_iteration())


def test_an_implementation_has_parity_with_itself() -> None:
    (case, *_) = parity_cases("torch-fsdp1", "torch-fsdp1", 2, ["deep_nest"])
    assert compare_case("torch-fsdp1", "torch-fsdp1", case).equal


def test_fsdp2_gathers_once_more_after_a_forward_without_backward() -> None:
    """What the numbers cannot show: torch's FSDP2 aims a prefetch at a unit of the forward that had no backward."""
    case = Case(
        model=ModelSpec("mlp"),
        world=WorldSpec(2),
        program=parity_program(),
        wrapping=WrappingPlan(units=("layers.0", "layers.1", "layers.2")),
    )
    found = compare_case("torch-fsdp1", "torch-fsdp2", case)
    memory = next(c for c in found.comparisons if c.aspect == "memory" and c.rank == 0)
    extra = [row.right for row in memory.rows if not row.same and not row.left]
    assert extra == ["gather layers.2", "free layers.2"]


@pytest.mark.parametrize(
    ("left", "right", "models", "expected"),
    [("torch-ddp", "torch-fsdp1", [], "unit_trace"), ("torch-fsdp1", "torch-fsdp2", ["nope"], "nope")],
)
def test_what_cannot_be_compared_is_refused(left: str, right: str, models: list[str], expected: str) -> None:
    with pytest.raises(InvalidArgument, match=expected):
        parity_cases(left, right, 2, models)
