"""Hooks that users put on parameters, and when they run.

The user's tensors get no gradient from autograd (views of the full buffer do). The reference runs their hooks: tensor
hooks on this rank's own full gradient before it is reduced, as under DDP; post-accumulate hooks, and optimizers that
step in backward, once ``.grad`` is set. Autograd would run them too, without a gradient, because the graph leads to these
tensors ([Note: chosen parameters] in ``autograd/tracked.py``): it does not find them (:func:`set_aside`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fsdp_ref.errors import FsdpRuntimeError
from fsdp_ref.handle.flat_handle import FlatHandle
from fsdp_ref.handle.originals import OwnHook
from fsdp_ref.storage.views import flat_views, set_grad

_IN_BACKWARD = "_in_backward_optimizers"


def is_hooked(param: Tensor) -> bool:
    """Return whether a user has put hooks on a parameter that is in no unit yet."""
    return bool(
        param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None) or hasattr(param, _IN_BACKWARD)
    )


def run_tensor_hooks(handle: FlatHandle, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the gradients after the hooks that users registered on their parameters with ``register_hook``."""
    result = list(grads)
    if not handle.originals.use_orig_params:
        return _flat_hooks(handle, result)
    for index, param in enumerate(handle.originals.params):
        if result[index] is not None and _users_hooks(param):
            result[index] = _run(param, result[index])
    return result


def _flat_hooks(handle: FlatHandle, grads: list[Tensor | None]) -> list[Tensor | None]:
    """A hook on the flat parameter sees the flat gradient."""
    flat = handle.flat_param
    if not _users_hooks(flat):
        return grads
    # Zeros: a hook on the flat gradient finds them where a parameter was not used, and in gaps.
    local = torch.zeros(handle.layout.numel, dtype=handle.compute_dtype, device=handle.config.device)
    for view, grad in zip(flat_views(local, handle.layout), grads):
        if grad is not None:
            view.copy_(grad)
    return [*flat_views(_run(flat, local), handle.layout)]


def set_aside(handle: FlatHandle) -> None:
    """Take users' hooks off what users hold, until :func:`put_back`."""
    # Our node has them as inputs: the engine comes to them next, without a gradient, and would run the hooks once more.
    for param in handle.originals.held:
        tensor_hooks: dict[int, Any] = param._backward_hooks or {}
        users = _users_hooks(param)
        later: dict[int, Any] = getattr(param, "_post_accumulate_grad_hooks", None) or {}
        for hooks, taken in ((tensor_hooks, users), (later, dict(later))):
            if taken:
                handle.originals.hooks_aside.append((hooks, taken))
                # In the dictionary that torch reads: it is the same object when hooks are put back, with the hooks added since.
                for key in taken:
                    del hooks[key]


def put_back(handle: FlatHandle) -> None:
    """Put users' hooks back, before hooks that were added since."""
    for hooks, taken in handle.originals.hooks_aside:
        newer = {key: hook for key, hook in hooks.items() if not isinstance(hook, OwnHook)}
        for key in newer:
            del hooks[key]
        hooks.update(taken | newer)
    handle.originals.hooks_aside.clear()


def _run(param: Tensor, grad: Any) -> Tensor:
    for hook in _users_hooks(param).values():
        replaced = hook(grad)
        grad = grad if replaced is None else replaced
    return grad  # user hooks return tensors


def _users_hooks(param: Tensor) -> dict[int, Any]:
    hooks: dict[int, Any] = param._backward_hooks or {}
    if len(hooks) < 2 and all(isinstance(hook, OwnHook) for hook in hooks.values()):
        return {}  # nearly always
    return {key: hook for key, hook in hooks.items() if not isinstance(hook, OwnHook)}


def run_after_accumulation(handle: FlatHandle) -> None:
    """Run post-accumulate hooks, and step optimizers that were applied in backward.

    Raises:
        FsdpRuntimeError: an optimizer was applied in backward to a flat parameter.
    """
    for param in handle.originals.held:
        # A rank without elements or without use has no gradient, and autograd would run nothing for it either.
        if param.grad is None:
            continue
        for hook in list((getattr(param, "_post_accumulate_grad_hooks", None) or {}).values()):
            hook(param)
        optimizers = getattr(param, _IN_BACKWARD, None)
        if optimizers:
            if not handle.originals.use_orig_params:
                raise FsdpRuntimeError(
                    "Optimizer in backward is only supported with use_orig_params=True: expected original parameters, "
                    f"got the flat parameter of {handle.name!r}. Pass use_orig_params=True."
                )
            # The gradient is dropped after its step, as torch's own hook does: memory for one at a time is the
            # point of it.
            for optimizer in optimizers:
                optimizer.step()
            set_grad(param, None)
