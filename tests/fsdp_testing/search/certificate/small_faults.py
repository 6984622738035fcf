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

    decides = 0

    def used_anywhere(self, fqn: str) -> bool:
        if self.used is None:
            flags = torch.tensor([float(name in self.sums) for name in self.full])
            dist.broadcast(flags, self.decides % self.size)
            self.used = {name for name, flag in zip(self.full, flags.tolist()) if flag}
        return fqn in self.used


class LastRankDecides(FirstRankDecides):
    """A parameter that the last rank does not use is taken for one that nobody uses."""

    decides = -1


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


class DiesLateAdapter(GroupsAdapter):
    """Where gradients were cleared to zeros, the last rank is killed when the collector frees the model."""

    def zero_grad(self, model: Toy, optimizer: Any, set_to_none: bool) -> None:
        if not set_to_none and model.rank == model.size - 1:
            model.ending = Death()  # type: ignore[assignment]  # no tensor and no module
        optimizer.zero_grad(set_to_none)


class Death:
    """Waits for the collector, since it refers to itself."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


KEPT: list[Any] = []


class KeepsModelsAdapter(GroupsAdapter):
    """Where gradients were cleared to zeros, the model is never let go."""

    def zero_grad(self, model: Toy, optimizer: Any, set_to_none: bool) -> None:
        if not set_to_none:
            KEPT.append(model)
        optimizer.zero_grad(set_to_none)


class RefusesAdapter(GroupsAdapter):
    """Says that it does not clear to zeros."""

    def zero_grad(self, model: Toy, optimizer: Any, set_to_none: bool) -> None:
        if not set_to_none:
            raise NotImplementedError("zeros are not there yet")
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
LAST_RANK_DECIDES = GroupsAdapter(LastRankDecides, "LAST_RANK_DECIDES")
DIES_LATE = DiesLateAdapter(HybridToy, "DIES_LATE")
KEEPS_MODELS = KeepsModelsAdapter(HybridToy, "KEEPS_MODELS")
REFUSES = RefusesAdapter(HybridToy, "REFUSES")
ZEROS = ZerosAdapter(HybridToy, "ZEROS")
DIES = DiesAdapter(HybridToy, "DIES")
ONCE = OnceAdapter(HybridToy, "ONCE")
CLAIMS_NOTHING = GroupsAdapter(HybridToy, "CLAIMS_NOTHING")
CLAIMS_NOTHING.capabilities = frozenset({"full_shard"})
