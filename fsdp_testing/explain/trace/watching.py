"""When do modules run forward and backward, and when does the rank wait? Seen through public hooks and `Work.wait`.

The graph's structure is left as it is. Waits inside C++ (DDP's reducer) are not seen.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from fsdp_testing.explain.trace.recorder import TraceRecorder


@contextmanager
def watch_modules(recorder: TraceRecorder, names: Mapping[nn.Module, str]) -> Iterator[None]:
    """Record pre_forward, post_forward and pre_backward of the modules in `names` while the context lasts.

    pre_backward is reported at the first gradient that reaches an output of the module; modules whose outputs need no
    gradient have none.
    """

    def first_gradient(name: str, reported: list[bool]) -> None:
        if not reported:
            reported.append(True)
            recorder.autograd(name, "pre_backward")

    def before(module: nn.Module, _args: Any) -> None:
        if module in names:
            recorder.autograd(names[module], "pre_forward")

    def after(module: nn.Module, _args: Any, output: Any) -> None:
        if module not in names:
            return
        recorder.autograd(names[module], "post_forward")
        reported: list[bool] = []
        # Most modules give one tensor; walking a tree of one costs more than everything else here.
        for leaf in (output,) if isinstance(output, torch.Tensor) else tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _grad, name=names[module]: first_gradient(name, reported))

    handles = [register_module_forward_pre_hook(before), register_module_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def watch_waits(recorder: TraceRecorder) -> Iterator[None]:
    """Record every wait for a collective while the context lasts."""
    original = dist.Work.wait

    def wait(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        start = time.monotonic()
        try:
            return original(work, *args, **kwargs)
        finally:
            recorder.waited(start, time.monotonic())

    setattr(dist.Work, "wait", wait)  # noqa: B010 - a method of torch's, replaced for the length of the trace
    try:
        yield
    finally:
        setattr(dist.Work, "wait", original)  # noqa: B010 - as above
