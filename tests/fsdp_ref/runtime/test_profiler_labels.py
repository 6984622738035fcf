"""What a profiler shows of a step: the event and the unit."""

from __future__ import annotations

import pytest
import torch

from fsdp_ref import compat


def labels(profile):
    return {event.name for event in profile.events() if event.name.startswith("FSDP::")}


@pytest.mark.world(2)
def test_a_profiler_sees_events_by_unit(trial, api):
    case = trial(api, "FULL_SHARD")
    case.train(1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        case.loss(case.inputs(0)).backward()
    units = ["root", "blocks.0", "blocks.1", "blocks.2"]
    events = ["pre_forward", "all_gather", "post_forward", "pre_backward", "post_backward", "post_backward_reduce"]
    assert labels(profile) >= {f"FSDP::{event} ({unit})" for event in events for unit in units}
    assert "FSDP::end_of_backward (root)" in labels(profile)
    assert "FSDP::reduce_scatter (blocks.1)" in labels(profile)


@pytest.mark.world(2)
def test_without_a_profiler_no_range_is_made(trial, monkeypatch):
    case = trial("orig", "FULL_SHARD")
    made = []
    monkeypatch.setattr(torch.profiler, "record_function", lambda name: made.append(name))
    case.train(1)
    assert made == []
    assert compat.labelled("pre_forward", "a") is compat.labelled("all_gather", "b")
