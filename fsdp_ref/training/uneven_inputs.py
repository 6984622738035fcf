"""Ranks with different numbers of batches train together, although every rank is needed to gather and to reduce.

A rank that has no batch left goes on with an example, whose gradients are zeros, and takes the optimizer steps of its
shards. Built on torch's own ``torch.distributed.algorithms.join.Join``, which counts who has batches left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from fsdp_ref.annotations import outermost_units, units_in
from fsdp_ref.errors import FsdpRuntimeError, UnsupportedError, listing
from fsdp_ref.runtime.unit import Unit
from fsdp_ref.storage.precision import tensors_in


class UnevenInputs(Joinable):
    """Lets ranks run different numbers of training steps with one sharded model.

    ::

        uneven = UnevenInputs(model, (example,), finish)  # finish: clip, optimizer.step(), zero_grad()
        with Join([uneven]):
            for batch in batches:
                loss_of(model(batch)).backward()
                uneven.finish()

    Each step's gradient is the mean over **all** ranks. A rank without a batch counts as zeros, as by default in ``join`` of
    torch's DDP. This equals the gradient in one process of the sum of the losses divided by the number of ranks. A rank
    without a batch runs ``model`` on the example, hooks included; random state and buffers are then restored. ``example``
    must give finite outputs, because zero times infinity is not zero.

    Args:
        model: the module that is called: one outermost unit, or a plain module around several.
        example: positional arguments of one call of ``model``, on this rank's device.
        finish: the rest of a step after backward; every rank calls it as often as the rank with the most batches.

    Raises:
        FsdpValueError: there is no unit.
        UnsupportedError: the units are over different ranks, or of some of them only; ``SyncBatchNorm`` is in the model.

    Collectives:
        In ``Join`` an all-reduce of one element announces each call of ``model``.
    """

    def __init__(self, model: nn.Module, example: Sequence[Any], finish: Callable[[], object]) -> None:
        super().__init__()
        units = outermost_units(model, "UnevenInputs")
        _refuse_model(model, units)
        self._model = model
        self._example = tuple(example)
        self._finish = finish
        self._device = units[0].config.device
        self._group = units[0].config.groups.shard if not units[0].config.hybrid else dist.group.WORLD
        self._unfinished = False
        self._joined = False
        # Before the units' own hooks, which communicate.
        model.register_forward_pre_hook(self._announce, prepend=True)

    def finish(self) -> None:
        """End a step: call the ``finish`` argument."""
        self._unfinished = False
        self._finish()

    def join_hook(self, **_: Any) -> JoinHook:
        """Return the hook that a rank without batches runs for each step of the others."""
        return _Shadow(self)

    @property
    def join_device(self) -> torch.device:
        """The device of computation."""
        return self._device

    @property
    def join_process_group(self) -> Any:
        """All ranks of the model."""
        return self._group

    def _announce(self, _: nn.Module, args: Any) -> None:
        if self._joined or not self._join_config.enable:
            return
        got = "a second forward before finish()" if self._unfinished else ""
        if not torch.is_grad_enabled():
            got = got or "a forward without gradients"
        elif not all(unit.sync_gradients for unit in units_in(self._model)):
            got = got or "a forward in no_sync()"
        if got:
            raise FsdpRuntimeError(
                f"UnevenInputs: expected in Join one forward with gradients, one backward and one finish() for each batch, got "
                f"{got}. Accumulate and evaluate outside of Join; ranks without batches do not take part in either."
            )
        self._unfinished = True
        Join.notify_join_context(self)

    def end(self) -> None:
        """Announce no batch any more: ``Join`` has ended."""
        self._join_config = type(self._join_config).construct_disabled_join_config()


class _Shadow(JoinHook):
    def __init__(self, training: UnevenInputs) -> None:
        self._training = training

    def main_hook(self) -> None:
        """Take part in a step of the ranks that have a batch, adding zeros."""
        training = self._training
        training._joined = True
        try:
            with _put_back(training._model, training._device):
                outputs = [each for each in tensors_in(training._model(*training._example)) if each.requires_grad]
                torch.autograd.backward(outputs, [torch.zeros_like(each) for each in outputs])
        finally:
            training._joined = False
        training.finish()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._training.end()


def _refuse_model(model: nn.Module, units: Sequence[Unit]) -> None:
    total = {unit.config.groups.total_size for unit in units}
    groups = {unit.config.groups.shard for unit in units}
    hybrid = any(unit.config.hybrid for unit in units)
    if len(groups) > 1 or (hybrid and total != {dist.get_world_size()}):
        raise UnsupportedError(
            "UnevenInputs: expected units over the same ranks (hybrid ones: over all), got "
            f"{listing(repr(unit) for unit in units)}. Make one UnevenInputs for each model."
        )
    synchronised = [name for name, each in model.named_modules() if isinstance(each, nn.SyncBatchNorm)]
    if synchronised:
        raise UnsupportedError(
            "UnevenInputs: expected modules that see their own rank's batch alone, got SyncBatchNorm at "
            f"{listing(synchronised)}. The example of a rank without batches would count in its statistics: use "
            "BatchNorm or LayerNorm."
        )


@contextmanager
def _put_back(model: nn.Module, device: torch.device) -> Iterator[None]:
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    devices = [device] if device.type != "cpu" else []
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        yield
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
