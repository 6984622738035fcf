"""The steps of a training, counted as `train` counts them: not each call of each optimizer is one.

What optimizers do between two backward passes is one step, and an optimizer that steps again begins another. An optimizer that
steps others inside its own step is one. A call that only has state made is none: torch does that when it saves and loads, and
so does a call without any gradient before the first backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from fsdp_testing.base.compat import in_backward, makes_state_only


@contextmanager
def at_each_step(listener: Callable[[Any], None]) -> Iterator[None]:
    """Call `listener` with the optimizer that begins each step of a training, before it, while the context lasts."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    steps, backward = _Steps(listener), torch.autograd.backward

    def watched(*args: Any, **kwargs: Any) -> None:
        if not in_backward():  # a checkpoint runs parts of a pass inside it
            steps.passed = True
            steps.of_this_step.clear()
        backward(*args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.autograd, "backward", watched))
        stack.callback(register_optimizer_step_pre_hook(steps.begin).remove)
        stack.callback(register_optimizer_step_post_hook(steps.end).remove)
        yield


class _Steps:
    """Which optimizers have stepped since the last backward pass, and which are inside their step."""

    def __init__(self, listener: Callable[[Any], None]) -> None:
        self._listener = listener
        self._inside: list[int] = []
        self.of_this_step: set[int] = set()
        self.passed = False

    def begin(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        this = id(optimizer)
        if this in self._inside:  # its step before has raised
            del self._inside[self._inside.index(this) :]
        self._inside.append(this)
        if len(self._inside) > 1 or makes_state_only() or not (self.passed or _has_work(optimizer, args, kwargs)):
            return
        new = not self.of_this_step or this in self.of_this_step
        self.of_this_step = {this} if new else self.of_this_step | {this}
        if new:
            self._listener(optimizer)

    def end(self, optimizer: Any, *_: Any) -> None:
        del self._inside[self._inside.index(id(optimizer)) :]


def _has_work(optimizer: Any, args: Any, kwargs: Any) -> bool:
    """Whether it is given a closure, or has a gradient."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return closure is not None or any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
