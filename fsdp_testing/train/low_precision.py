"""Detects whether a training computes under autocast or FSDP's mixed precision, and runs the same training in float32.

Roundings of bfloat16 hide a gradient that is a few percent wrong. In full precision a script treats its rows, losses and
gradients in the same way, and a mistake of that size is far above all roundings. What a script casts itself (a model in
bfloat16, a communication hook that compresses) stays in float32 too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from typing import Any
from unittest import mock

import torch

from fsdp_testing.base import compat

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

    default = torch.set_default_dtype
    with ExitStack() as stack:
        if not is_on:
            stack.enter_context(compat.operators_run_by(_in_single_precision))
            stack.enter_context(mock.patch.object(torch, "set_default_dtype", lambda dtype: default(_wide(dtype))))
        stack.enter_context(mock.patch.object(torch.autocast, "__enter__", enter_as_wanted))
        for policy in _policies():
            # Where it is read: a policy may be older than the training.
            stack.enter_context(mock.patch.object(policy, "__getattribute__", dtype_as_wanted))
        yield asked


def _wide(value: Any) -> Any:
    return torch.float32 if isinstance(value, torch.dtype) and value in _LOW else value


def _in_single_precision(operator: compat.Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator that casts to 16 bits, or makes a tensor of them, in float32."""
    # A view reads the same bits in another dtype.
    if operator.text != "aten.view.dtype":
        args, kwargs = tuple(map(_wide, args)), {name: _wide(value) for name, value in kwargs.items()}
    return operator.call(*args, **kwargs)


def _policies() -> Iterator[type]:
    for package in ("torch.distributed.fsdp", "fsdp_ref"):
        with suppress(ImportError):
            module = import_module(package)
            yield from (module.MixedPrecision, module.MixedPrecisionPolicy)
