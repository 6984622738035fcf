"""What does a training loop do to parameters by itself? Kept apart, since what torch raises here is the implementation's.

These are the lines that a user of the implementation writes. An exception that torch raises in one of them is about the
tensors that the implementation hands out; in any other file of the engine it would be the harness's own mistake.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


def set_requires_grad(parameters: Iterable[torch.Tensor], flag: bool) -> None:
    """Freezes or thaws parameters."""
    for parameter in parameters:
        parameter.requires_grad_(flag)


def scale(parameters: Iterable[torch.Tensor], factor: float) -> None:
    """Multiplies full parameters in place."""
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(factor)


def give_storage(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Gives parameters new storage with their numbers times `factor`."""
    for parameter in parameters:
        parameter.data = parameter.data * factor
