"""Warn of an optimizer step without any gradient after a forward pass that no backward has reached.

``backward(inputs=parameters)`` is such a case: autograd runs only what leads to ``inputs``, and the shards that users hold are
not in the graph. None of our hooks runs then, so that the step is the first thing that can be noticed.
"""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING, Any

from fsdp_ref.compat import after_optimizer_steps
from fsdp_ref.errors import explain

if TYPE_CHECKING:
    from torch import Tensor

    from fsdp_ref.handle.flat_handle import FlatHandle
    from fsdp_ref.runtime.root import Root

_roots: weakref.WeakSet[Root] = weakref.WeakSet()


def watch_steps(root: Root) -> None:
    """Look at the steps of optimizers that own parameters of this root."""
    after_optimizer_steps(_after_step)
    _roots.add(root)


def _after_step(optimizer: Any, *_: Any) -> None:
    waiting = [root for root in _roots if root.awaits_backward]
    if not waiting:
        return
    params: list[Tensor] = [param for group in optimizer.param_groups for param in group["params"]]
    if any(param.grad is not None for param in params):
        return
    stepped = {id(param) for param in params}
    for root in waiting:
        handles = [unit.handle for unit in root.units if unit.handle is not None]
        if any(id(param) in stepped for handle in handles for param in _held_by_users(handle)):
            root.awaits_backward = False
            warnings.warn(_MESSAGE, stacklevel=4)


def _held_by_users(handle: FlatHandle) -> list[Tensor]:
    return [*handle.originals.params] if handle.originals.use_orig_params else [handle.flat_param]


_MESSAGE = explain(
    "optimizer.step after a forward pass in training",
    expected="gradients from a backward pass",
    got="none for any parameter of the optimizer: no backward has reached the sharded modules since",
    remedy="Call loss.backward() without `inputs`, which leaves out sharded parameters, and not torch.autograd.grad",
)
