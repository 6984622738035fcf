"""Notes the hooks that a script registers on parameters and that never run: wrapping may have lost them.

Where a wrapper puts other parameters into modules, hooks stay with the old ones, alike on every number of ranks. So runs
agree, and only who counts calls can tell.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

_OWN = ("torch", "deepspeed", "megatron", "fsdp_ref", "fsdp_testing")
"""Packages that register hooks for themselves, of which some are meant never to run."""


@dataclass(slots=True)
class _Registered:
    place: str
    ran: bool = False


class ParameterHooks:
    """Hooks on parameters since it began to watch."""

    def __init__(self) -> None:
        self._registered: list[_Registered] = []

    def idle(self) -> tuple[str, ...]:
        """Return where each hook was registered that has not run yet, as `file:line`, in the order of registration."""
        return tuple(hook.place for hook in self._registered if not hook.ran)

    @contextmanager
    def watch(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name in ("register_hook", "register_post_accumulate_grad_hook"):
                replacement = self._counting(getattr(torch.Tensor, name))
                stack.enter_context(mock.patch.object(torch.Tensor, name, replacement))
            yield

    def _counting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def register(tensor: torch.Tensor, hook: Callable[..., Any]) -> Any:
            if not isinstance(tensor, nn.Parameter) or _module_of(hook).partition(".")[0] in _OWN:
                return original(tensor, hook)
            caller = sys._getframe(1)
            noted = _Registered(f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}")
            self._registered.append(noted)

            @functools.wraps(hook, updated=())
            def counted(*args: Any) -> Any:
                noted.ran = True
                return hook(*args)

            return original(tensor, counted)

        return register


def _module_of(hook: Any) -> str:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", None) or type(hook).__module__)
