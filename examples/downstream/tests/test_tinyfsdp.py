"""Three ways to test one's own sharding: on ranks, with drawn examples, and against the checks of the harness."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tinyfsdp import TinyFSDP
from tinyfsdp.testing import IMPLEMENTATION
from torch import nn

from fsdp_testing import parametrize_with_checks, run_conformance
from fsdp_testing.cases.drawing import cases
from fsdp_testing.cases.records import Verdict
from fsdp_testing.checks.conformance import run_case


@pytest.mark.world([2, 3])
def test_shards_are_equal_and_cover_the_model(world):
    model = TinyFSDP(nn.Linear(5, 3), world.group)
    assert len(set(world.all_gather_object(len(model.flat)))) == 1
    assert model.flat.numel() * world.size >= model.elements == 18


def mean_gradient(sizes):
    """What each rank holds after the backward of one linear layer."""
    torch.manual_seed(0)
    model = TinyFSDP(nn.Linear(*sizes).double(), dist.group.WORLD)
    model(torch.full((1, sizes[0]), float(dist.get_rank()), dtype=torch.float64)).sum().backward()
    return model.flat.grad.tolist()


@settings(max_examples=5, deadline=None)
@given(sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)))
def test_gradients_are_means_over_the_ranks(worlds, sizes):
    inputs, outputs = sizes
    held = [number for part in worlds(size=2).run(mean_gradient, sizes) for number in part]
    # Inputs are the rank's number, so that a weight's mean gradient is one half, and a bias's is one.
    assert held[: inputs * outputs + outputs] == [0.5] * (inputs * outputs) + [1.0] * outputs


@settings(max_examples=5, deadline=None)
@given(case=cases(capabilities=IMPLEMENTATION.capabilities, max_operations=5))
def test_drawn_programs_give_what_one_process_gives(case):
    judged = run_case("tinyfsdp", case)
    assert judged.outcome.verdict is not Verdict.FAIL, judged.finding


@parametrize_with_checks("tinyfsdp", checks=("training.*", "sizes.uneven"))
def test_checks(check):
    check()


def test_the_report_names_it():
    report = run_conformance("tinyfsdp", checks=("training.gradients_are_means",))
    assert [result.verdict for result in report.results] == [Verdict.PASS]
