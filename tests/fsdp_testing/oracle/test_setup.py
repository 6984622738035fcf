"""What wrapping finds: modules that it does not manage are where their user has put them."""

from __future__ import annotations

import torch
from torch import nn

from fsdp_testing.adapters.protocol import Setup
from fsdp_testing.oracle.setup import move_what_is_ignored


def test_ignored_modules_are_on_the_device_before_wrapping() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    move_what_is_ignored(model, Setup(0, 1, torch.device("meta"), ignored=("1",)))
    assert [parameter.device.type for parameter in model.parameters()] == ["cpu", "cpu", "meta", "meta"]
