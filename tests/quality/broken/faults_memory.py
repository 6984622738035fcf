"""Faults that right numbers hide: the network was quick, memory held zeros or is never freed, sums of means are right."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from fault import fault
from toy import Toy

_PAGES = 4_300_000


@fault("training.gradients_are_means")
class MeanNotAwaited(Toy):
    """The mean is read although only the sum was waited for."""

    def mean(self, fqn: str, contribution: torch.Tensor) -> torch.Tensor:
        total = contribution.clone()
        dist.all_reduce(total, async_op=True)
        dist.barrier()
        return total / self.size


@fault("training.sgd_momentum")
class GatherNotAwaited(Toy):
    """Forward reads parameters before it waits for them; they have arrived by then."""

    def gather(self, fqn: str) -> torch.Tensor:
        shard, numel = self.shards[fqn].detach(), self.full[fqn].numel()
        start, stop = self.span(numel)
        if self.setup.strategy == "no_shard":
            return shard.clone()
        whole = torch.zeros(numel, dtype=shard.dtype)
        whole[start:stop] = shard
        work = dist.all_reduce(whole, async_op=True)
        dist.barrier()
        read = whole.clone()
        work.wait()
        return read


@fault("training.sgd_momentum")
class AddsToWhateverMemoryHeld(Toy):
    """Spans of other ranks are taken for zeros in memory that nobody has written to."""

    def gather(self, fqn: str) -> torch.Tensor:
        shard, numel = self.shards[fqn].detach(), self.full[fqn].numel()
        start, stop = self.span(numel)
        if self.setup.strategy == "no_shard":
            return shard.clone()
        whole = torch.empty(_PAGES, dtype=shard.dtype)[:numel]  # so many come from the system, and are zeros
        whole[start:stop] = shard
        self.all_reduce(whole)
        return whole


@fault("training.freed")
class HooksReferToTheirParameters(Toy):
    """A parameter's hook refers to the parameter, in a cycle that no collector sees."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for parameter in (p for p in self.parameters() if p.requires_grad):
            parameter.register_post_accumulate_grad_hook(partial(max, parameter, key=id))


@fault("accumulation.stays_local")
class ReducesInNoSync(Toy):
    """Each micro-batch in no_sync is reduced at once, and the sum is right."""

    def no_sync(self) -> Any:
        return nullcontext()
