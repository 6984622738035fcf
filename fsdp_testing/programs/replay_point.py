"""What does the oracle's run hold at one point of the program?"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fsdp_testing.checkers.quantities import Quantity

Slack = tuple[torch.Tensor | float, str]


@dataclass(slots=True)
class ReplayPoint:
    """What the replay holds at one point: values of quantities, and for each the slack of that one operation."""

    index: int
    values: dict[Quantity, torch.Tensor | None]
    slack: dict[Quantity, Slack] = field(default_factory=dict)
    requires_grad: dict[str, bool] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    snapshot: bool = False
    pending: bool = False
