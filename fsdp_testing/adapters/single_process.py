"""Data parallelism as its definition says: every rank trains a whole copy, and gradients are averaged after backward.

This is the computation of one process on all the data, spread over ranks: no buckets, no overlap, no shards. A check that fails
here is itself wrong, so this adapter is the specificity control of every suite.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import nn

from fsdp_testing.adapters.adapter import TorchStyle
from fsdp_testing.adapters.protocol import Division, Setup
from fsdp_testing.adapters.shared import replicated
from fsdp_testing.adapters.shared.checkpointing import checkpoint_modules
from fsdp_testing.adapters.shared.claims import REPLICATED
from fsdp_testing.base.compat import after_backward
from fsdp_testing.errors import InvalidImplementation

CAPABILITIES = REPLICATED | {
    "policy_wrapping",
    "policy_beside_units",
    "several_forwards",
    "thawed_parameters",
    "opaque_outputs",
    "forward_methods",
    "units_after_forward",
    "reentrant_checkpointing",
    "dtype_cast",
    "exception_recovery",
}


class _Averaging:
    """Averages a module's gradients over a group at the end of every backward, unless switched off."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None) -> None:
        self.enabled = True
        # Weakly: the parameters' hooks keep this object alive, through C++ references that the collector does not see.
        self._module = ref(module)
        self._group = group
        self._queued = False
        self._hooked: set[int] = set()

    def _parameters(self) -> list[nn.Parameter]:
        module = self._module()
        # Frozen ones too: a parameter frozen while its gradient awaits reduction is reduced with the others.
        return [] if module is None else list(module.parameters())

    def watch_parameters(self) -> None:
        """Hook new parameters; called in every forward, because one may have been thawed."""
        self._queued = False  # a backward that raised has left it set
        for parameter in self._parameters():
            if parameter.requires_grad and id(parameter) not in self._hooked:
                self._hooked.add(id(parameter))
                parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def _on_gradient(self, _parameter: torch.Tensor) -> None:
        if self.enabled and not self._queued:
            self._queued = True
            after_backward(self._average)

    def _average(self) -> None:
        """Average. Collectives: one all-reduce of flags, then one per parameter that some rank has a gradient for."""
        self._queued = False
        parameters = self._parameters()
        present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8)
        dist.all_reduce(present, dist.ReduceOp.MAX, group=self._group)
        for parameter, somewhere in zip(parameters, present.tolist()):
            if somewhere:
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                total = grad.contiguous()
                dist.all_reduce(total, group=self._group)
                parameter.grad = grad.copy_(total.div_(dist.get_world_size(self._group)))


_AVERAGING: WeakKeyDictionary[nn.Module, _Averaging] = WeakKeyDictionary()


def wrap(module: nn.Module, setup: Setup) -> nn.Module:
    """Put hooks on the module itself. Collectives: none."""
    if setup.strategy != "no_shard":
        raise InvalidImplementation(
            f"single-process: expected strategy 'no_shard', got {setup.strategy!r}. Run only what it claims."
        )
    checkpoint_modules(module, setup.checkpointed, reentrant=setup.checkpoint_reentrant)
    group = setup.group
    # Use the module that is called: a deep copy has the hook too, and averages its own gradients.
    module.register_forward_pre_hook(lambda called, _args: _averaging_of(called, group).watch_parameters())
    _averaging_of(module, group)
    return module


def _averaging_of(module: nn.Module, group: dist.ProcessGroup | None) -> _Averaging:
    if module not in _AVERAGING:
        _AVERAGING[module] = _Averaging(module, group)
    return _AVERAGING[module]


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backwards inside leave this rank's gradients unreduced."""
    averaging = _AVERAGING[model]
    before, averaging.enabled = averaging.enabled, False
    try:
        yield
    finally:
        averaging.enabled = before


def forget(model: nn.Module) -> None:
    """Drop the state that is kept for a model."""
    _AVERAGING.pop(model, None)


def division(setup: Setup) -> Division:
    """One sum, then one division by the number of ranks."""
    return Division(before=1, after=setup.world_size)


IMPLEMENTATION = TorchStyle(
    name="single-process",
    wrap=wrap,
    capabilities=CAPABILITIES,
    source="Definition of synchronous data parallelism: the mean of the ranks' gradients.",
    no_sync=no_sync,
    division=division,
    **replicated.METHODS,
    finish=forget,
)
