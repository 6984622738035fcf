"""Detects whether a training computes under autocast or FSDP's mixed precision, and runs the same training without them.

Roundings of bfloat16 hide a gradient that is a few percent wrong. In full precision a script treats its rows, losses and
gradients in the same way, and a mistake of that size is far above all roundings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from typing import Any
from unittest import mock

import torch

_LOW = (torch.bfloat16, torch.float16)


@contextmanager
def watched(*, is_on: bool) -> Iterator[list[bool]]:
    """Watch autocast and policies of mixed precision, or switch them off.

    Args:
        is_on: Whether they stay as the training has them.

    Yields:
        A list that is not empty once the training has asked for either.
    """
    enter: Callable[[Any], Any] = torch.autocast.__enter__
    asked: list[bool] = []

    def enter_as_wanted(context: Any) -> Any:
        if context._enabled and not asked:
            asked.append(True)
        context._enabled = context._enabled and is_on
        return enter(context)

    def dtype_as_wanted(policy: Any, name: str) -> Any:
        value = object.__getattribute__(policy, name)
        if not name.endswith("_dtype") or value not in _LOW:
            return value
        if not asked:
            asked.append(True)
        return value if is_on else torch.float32

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.autocast, "__enter__", enter_as_wanted))
        for policy in _policies():
            # Where it is read: a policy may be older than the training.
            stack.enter_context(mock.patch.object(policy, "__getattribute__", dtype_as_wanted))
        yield asked


def _policies() -> Iterator[type]:
    for package in ("torch.distributed.fsdp", "fsdp_ref"):
        with suppress(ImportError):
            module = import_module(package)
            yield from (module.MixedPrecision, module.MixedPrecisionPolicy)
