"""Entries of states, compared to the bit: what differs first, what may be written in two ways, what is malformed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp_testing.adapters import registry
from fsdp_testing.errors import InvalidImplementation
from fsdp_testing.oracle import ways
from fsdp_testing.ranks.pool.channel import dumps
from fsdp_testing.search.checkpoints.axes import LAYOUTS, SUBJECTS, missing
from fsdp_testing.search.checkpoints.entries import Entries, Entry, first_difference, of_state
from fsdp_testing.search.checkpoints.on_ranks import Item
from fsdp_testing.search.checkpoints.verdicts import _expected_entries

WEIGHT = Entry("parameter", "w")
MOMENT = Entry("state", "w", "exp_avg")
STEP = Entry("state", "w", "step")
RATE = Entry("setting", "w", "lr")
BETAS = Entry("setting", "w", "betas")


def tensor(*values: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize(
    ("entry", "expected", "actual", "said"),
    [
        (WEIGHT, tensor(1, 2), tensor(1, 3), "parameter w, element 1: got 3.0, expected 2.0"),
        (WEIGHT, tensor(0.0), tensor(-0.0), "parameter w, element 0: got -0.0, expected 0.0"),
        (WEIGHT, tensor(1, 2), tensor(1), "parameter w: got shape (1,), expected (2,)"),
        (MOMENT, tensor(1, 2), tensor(1, 2, dtype=torch.float32), "exp_avg of w: got torch.float32, expected"),
        (MOMENT, tensor(1, 2), 1.0, "exp_avg of w: got 1.0, expected tensor("),
        (STEP, 2.0, tensor(3), "step of w: got 3.0, expected 2.0"),
        (RATE, 0.1, 0.2, "lr of w: got 0.2, expected 0.1"),
        (BETAS, (0.8, 0.9), [0.9, 0.8], "betas of w: got (0.9, 0.8), expected (0.8, 0.9)"),
    ],
)
def test_what_differs_is_named_with_both(entry: Entry, expected: Any, actual: Any, said: str):
    assert first_difference({entry: expected}, {entry: actual}).startswith(said)
    assert first_difference({entry: expected}, {}) == f"{entry} is missing"


def test_one_thing_may_be_written_in_two_ways():
    expected = {STEP: 2.0, BETAS: (0.8, 0.9), WEIGHT: tensor(float("nan"))}
    assert not first_difference(expected, {STEP: tensor(2), BETAS: [0.8, 0.9], WEIGHT: tensor(float("nan"))})


def test_groups_say_whose_they_are():
    state = {"model": {}, "optimizer": {"state": {}, "param_groups": [{"lr": 0.1, "params": ["a", "b"]}]}}
    assert of_state(state) == {Entry("setting", name, "lr"): 0.1 for name in "ab"}
    del state["optimizer"]["param_groups"][0]["params"]  # type: ignore[index]
    with pytest.raises(InvalidImplementation, match="names of their parameters"):
        of_state(state)


def test_settings_of_a_parameter_that_is_left_out_are_missed():
    """Only a flat parameter stands for others; a group that is gone is gone."""
    item = Item("", "memory", "", "", loads=True)
    weights: Entries = {Entry("parameter", RATE.name): 1.0, Entry("parameter", "v"): 1.0}
    truth = {**weights, RATE: 0.1, Entry("setting", "v", "lr"): 0.1}
    lacking = {**weights, RATE: 0.1}
    assert first_difference(_expected_entries(truth, item, lacking), lacking) == "lr of v is missing"
    for name in ("outer.flat", "outer._flat_param"):  # whatever an implementation calls it
        flat = {**weights, Entry("setting", name, "lr"): 0.1}
        assert not first_difference(_expected_entries(truth, item, flat), flat)
        flat = {**weights, Entry("setting", name, "lr"): 0.2}
        wrong = first_difference(_expected_entries(truth, item, flat), flat)
        assert wrong == f"lr of {name}: got 0.2, expected 0.1"


def test_a_file_may_hold_tensors_and_plain_data_only(tmp_path: Path):
    torch.save({"model": {"w": Path("/")}}, tmp_path / "state.pt")
    with pytest.raises(Exception, match="weights_only|Weights only"):
        ways.read("file", tmp_path)
    (tmp_path / "objects.pickle").write_bytes(dumps({"model": {}}))
    assert ways.read("memory", tmp_path) == {"model": {}}


def test_what_is_not_claimed_is_not_expected_entries():
    ddp, flat = registry.load("torch-ddp"), registry.load("torch-fsdp1-flat")
    asked = {layout.strategy for layout in LAYOUTS if not missing(SUBJECTS["no state"], layout, ddp)}
    assert asked == {"no_shard"}
    assert missing(SUBJECTS["adamw, two groups"], LAYOUTS[2], flat) == {"frozen_mixed_unit"}
    assert not missing(SUBJECTS["no state"], LAYOUTS[2], flat)
