"""The steps of a training, counted as `train` counts them: not each call of each optimizer is one.

What optimizers do between two backward passes is one step, and an optimizer that steps again begins another. So does one that is
given a closure, whose backward passes are part of its step. An optimizer that steps others, or its base class, within its step
makes one step. A call that only creates state is no step: torch makes such calls when it saves and loads, and a call without any
gradient before the first backward pass only creates state too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any
from unittest import mock

from fsdp_testing.base.compat import in_backward, makes_state_only, running


@contextmanager
def at_each_step(listener: Callable[[Any], None]) -> Iterator[None]:
    """Before each step of a training call `listener` with the optimizer that begins it, while the context lasts."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    steps, backward = _Steps(listener), torch.autograd.backward

    def watched(*args: Any, **kwargs: Any) -> None:
        if not in_backward():  # a checkpoint runs parts of a pass inside it
            steps.see_backward()
        backward(*args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.autograd, "backward", watched))
        stack.callback(register_optimizer_step_pre_hook(steps.begin).remove)
        stack.callback(register_optimizer_step_post_hook(steps.end).remove)
        yield


class _Steps:
    """The optimizers that have stepped since the last backward pass, and the running calls of `step`."""

    def __init__(self, listener: Callable[[Any], None]) -> None:
        self._listener = listener
        self._calls: list[FrameType] = []
        self._of_this_step: set[int] = set()
        self._passed = False

    def see_backward(self) -> None:
        self._passed = True
        if not self._inside():
            self._of_this_step.clear()

    def begin(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        inside = self._inside()
        self._calls.append(sys._getframe(1))  # torch's, around the step: the same one calls `end`
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None) is not None
        if inside or makes_state_only() or not (self._passed or closure or _has_gradient(optimizer)):
            return
        this = id(optimizer)
        new = closure or not self._of_this_step or this in self._of_this_step
        self._of_this_step = {this} if new else self._of_this_step | {this}
        if new:
            self._listener(optimizer)

    def end(self, *_: Any) -> None:
        call = sys._getframe(1)
        if call in self._calls:
            del self._calls[self._calls.index(call) :]

    def _inside(self) -> bool:
        """Whether a step is under way; one that raised is not, though it has no end."""
        self._calls = running(self._calls)
        return bool(self._calls)


def _has_gradient(optimizer: Any) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
