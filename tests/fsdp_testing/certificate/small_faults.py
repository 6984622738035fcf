"""One fault each, in a toy that shards over groups: what the cube must show without a check written for it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from faults_kinds import HybridToy
from toy import Toy, ToyAdapter


class GroupsAdapter(ToyAdapter):
    """Claims groups of ranks and units; a toy keeps everything in one unit, which is no fault."""

    def __init__(self, toy: type[Toy], name: str) -> None:
        super().__init__(toy, name)
        self.capabilities |= {"hybrid", "nested_wrapping"}


class Alone(HybridToy):
    """In a shard group of one rank local micro-batches are lost."""

    def accumulate(self, fqn: str, gradient: torch.Tensor) -> None:
        if self.synchronize or not self.hybrid or dist.get_world_size(self.inside) > 1:
            super().accumulate(fqn, gradient)


class Factor(HybridToy):
    """With several groups of several ranks the sum is divided by the ranks of one group."""

    def mean(self, fqn: str, contribution: torch.Tensor) -> torch.Tensor:
        mean = super().mean(fqn, contribution)
        inside = dist.get_world_size(self.inside) if self.hybrid else self.size
        return mean * (self.size / inside) if 1 < inside < self.size else mean


class Unused(HybridToy):
    """What the micro-batch that reduces did not use keeps nothing of those before."""

    def finish_backward(self) -> None:
        if self.synchronize:
            used = {fqn for fqn, parameter in self.full.items() if parameter.grad is not None}
            self.sums = {fqn: held for fqn, held in self.sums.items() if fqn in used}
        super().finish_backward()


class FirstRankDecides(HybridToy):
    """A parameter that rank 0 does not use is taken for one that nobody uses."""

    def used_anywhere(self, fqn: str) -> bool:
        if self.used is None:
            flags = torch.tensor([float(name in self.sums) for name in self.full])
            dist.broadcast(flags, 0)
            self.used = {name for name, flag in zip(self.full, flags.tolist()) if flag}
        return fqn in self.used


class ZerosAdapter(GroupsAdapter):
    """Clearing to zeros clears nothing."""

    def zero_grad(self, _model: Toy, optimizer: Any, set_to_none: bool) -> None:
        if set_to_none:
            optimizer.zero_grad()


class DiesAdapter(GroupsAdapter):
    """Where there are three ranks, clearing to zeros kills the last one."""

    def zero_grad(self, model: Toy, optimizer: Any, set_to_none: bool) -> None:
        if not set_to_none and model.size == 3 and model.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad(set_to_none)


class OnceAdapter(GroupsAdapter):
    """Dies the first time, as a machine without memory may have it."""

    def zero_grad(self, model: Toy, optimizer: Any, set_to_none: bool) -> None:
        once = Path(os.environ.get("CERTIFICATE_DIES_ONCE", "/nowhere"))
        if model.size == 2 and model.rank == 0 and once.exists():
            once.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad(set_to_none)


UNBROKEN = GroupsAdapter(HybridToy, "UNBROKEN")
ALONE = GroupsAdapter(Alone, "ALONE")
FACTOR = GroupsAdapter(Factor, "FACTOR")
UNUSED = GroupsAdapter(Unused, "UNUSED")
FIRST_RANK_DECIDES = GroupsAdapter(FirstRankDecides, "FIRST_RANK_DECIDES")
ZEROS = ZerosAdapter(HybridToy, "ZEROS")
DIES = DiesAdapter(HybridToy, "DIES")
ONCE = OnceAdapter(HybridToy, "ONCE")
CLAIMS_NOTHING = GroupsAdapter(HybridToy, "CLAIMS_NOTHING")
CLAIMS_NOTHING.capabilities = frozenset({"full_shard"})
