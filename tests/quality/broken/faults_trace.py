"""Faults that no number shows: what is gathered, freed, reduced and held, and in which order."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from fault import FAULTS, Fault, fault
from toy_more import MoreAdapter, MoreToy


@fault("trace.gathers_needed")
class GathersTwice(MoreToy):
    """Everything is gathered twice before each forward."""

    def all_gather(self, whole: torch.Tensor, mine: torch.Tensor) -> None:
        super().all_gather(whole, mine)
        super().all_gather(whole, mine)
        super().all_gather(whole, mine)


@fault("trace.gathered_and_freed")
class NeverFreed(MoreToy):
    """What was gathered stays for ever."""

    def release(self) -> None:
        self.emit("", "reshard", ())


@fault("trace.gathered_and_freed")
class GathersWhatItHolds(MoreToy):
    """A unit that is gathered is gathered again in backward."""

    def queue(self, gradient: torch.Tensor) -> None:
        if not self.queued and self.setup.strategy != "no_shard":
            self.emit("", "gather", ())
        super().queue(gradient)


@fault("trace.held_while_used")
class FreedTooEarly(MoreToy):
    """Parameters are given up before the modules run."""

    def unshard(self) -> None:
        super().unshard()
        self.release()

    def finish_backward(self) -> None:
        if self.setup.strategy != "no_shard":
            self.emit("", "gather", ())
        super().finish_backward()


@fault("trace.reductions_needed")
class ReducesTwice(MoreToy):
    """Every gradient is reduced a second time, for nothing."""

    def average(self, flat: torch.Tensor, output: torch.Tensor | None) -> torch.Tensor:
        super().average(flat.clone(), None if output is None else output.clone())
        return super().average(flat, output)


@fault("trace.recomputed")
class ReducesPerUse(MoreToy):
    """A model with recomputed modules is reduced once more (B035)."""

    def reduce(self) -> None:
        if any("_checkpoint_wrapped_module" in name for name, _ in self.inner.named_parameters()):
            dist.all_reduce(torch.zeros(64))
        super().reduce()


@fault("trace.same_collectives")
class LonelyCollective(MoreToy):
    """Rank 0 reduces once more than the others, after its last backward."""

    def reduce(self) -> None:
        super().reduce()
        if self.rank == 0:
            dist.all_reduce(torch.zeros(64), async_op=True)


@fault("trace.same_collectives")
class OtherOrder(MoreToy):
    """Ranks reduce two things in different orders."""

    def reduce(self) -> None:
        super().reduce()
        first, second = torch.zeros(64), torch.zeros(32)
        for tensor in (first, second) if self.rank == 0 else (second, first):
            dist.all_reduce(tensor, async_op=True)


class PerLayer(MoreToy):
    """A model that tells of its layers as units, gathered all at once."""

    order = 1

    def unshard(self) -> None:
        MoreToy.unshard(self)
        for unit in self.layers()[:: self.order]:
            self.emit(unit, "unshard", ())
            self.emit(unit, "gather", ())

    def release(self) -> None:
        for unit in self.layers():
            self.emit(unit, "reshard", ())
            self.emit(unit, "free", ())
        MoreToy.release(self)

    def layers(self) -> list[str]:
        """Units with parameters, in the order in which they run; none where nothing is sharded."""
        if self.setup.strategy == "no_shard":
            return []
        return list(dict.fromkeys(fqn.rpartition(".")[0] for fqn in self.full))


class PerLayerAdapter(MoreAdapter):
    """Shows the layers as units; the root holds nothing."""

    def units(self, model: Any) -> list[tuple[str, tuple[str, ...]]]:
        inside = {unit: tuple(f for f in model.full if f.rpartition(".")[0] == unit) for unit in model.layers()}
        return [("", ()), *inside.items()]


class HoldsEverything(PerLayer):
    """All units are gathered before the first one runs."""


class GathersBackwards(PerLayer):
    """Units are gathered in the reverse of the order in which they run."""

    order = -1


PER_LAYER = PerLayerAdapter(PerLayer, "PER_LAYER")
HOLDS_EVERYTHING = PerLayerAdapter(HoldsEverything, "HOLDS_EVERYTHING")
GATHERS_BACKWARDS = PerLayerAdapter(GathersBackwards, "GATHERS_BACKWARDS")
FAULTS["faults_trace:HOLDS_EVERYTHING"] = Fault(HOLDS_EVERYTHING, ("trace.memory_bound",), str(HoldsEverything.__doc__))
FAULTS["faults_trace:GATHERS_BACKWARDS"] = Fault(GATHERS_BACKWARDS, ("trace.order",), str(GathersBackwards.__doc__))
