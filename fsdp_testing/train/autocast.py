"""Detects whether a training computes under autocast, and runs the same training without it.

Roundings of bfloat16 hide a gradient that is a few percent wrong. Without autocast a script treats its rows, losses and gradients
in the same way, and a mistake of that size is far above all roundings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch


@contextmanager
def watched(*, is_on: bool) -> Iterator[list[bool]]:
    """Watch autocast, or switch it off.

    Args:
        is_on: Whether it stays as the training has it.

    Yields:
        A list that is not empty once the training has asked for autocast.
    """
    enter: Callable[[Any], Any] = torch.autocast.__enter__
    entered: list[bool] = []

    def enter_as_wanted(context: Any) -> Any:
        if context._enabled and not entered:
            entered.append(True)
        context._enabled = context._enabled and is_on
        return enter(context)

    with mock.patch.object(torch.autocast, "__enter__", enter_as_wanted):
        yield entered
