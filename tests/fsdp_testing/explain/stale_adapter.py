"""Adapters for tests of explanations: weights of before a step that are still in use, alone and beside another fault."""

from __future__ import annotations

from contextlib import contextmanager

from toy import Toy, ToyAdapter


class KeepsOldWeights(Toy):
    """A forward without backward leaves its weights in place, and the next such forward uses them again."""

    def __init__(self, module, setup) -> None:
        super().__init__(module, setup)
        self.fresh = False

    def unshard(self) -> None:
        if self.training or not self.fresh:
            super().unshard()
        self.fresh = not self.training


class TwoFaults(KeepsOldWeights):
    """Of several local micro-batches only the first counts besides."""

    def accumulate(self, fqn, gradient) -> None:
        if self.synchronize or fqn not in self.sums:
            super().accumulate(fqn, gradient)


class KeepsOneUnit(Toy):
    """One unit of the plain stack stays gathered after a forward without backward, and is used as it is by the next."""

    UNITS = ("layers.0", "layers.1", "layers.2")

    def __init__(self, module, setup) -> None:
        super().__init__(module, setup)
        self.emit = lambda *_: None
        self.held: set[str] = set()

    def unshard(self) -> None:
        kept = {} if self.training or "layers.1" not in self.held else self.full
        stale = {fqn: parameter.data.clone() for fqn, parameter in kept.items() if fqn.startswith("layers.1.")}
        super().unshard()
        for fqn, data in stale.items():
            self.full[fqn].data = data
        self.hold(*self.UNITS)

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        if not self.training:
            self.drop("layers.0", "layers.2")
        return output

    def finish_backward(self) -> None:
        super().finish_backward()
        self.drop(*self.UNITS)

    def hold(self, *units) -> None:
        for unit in units:
            if unit not in self.held:
                self.emit(unit, "gather", ())
        self.held |= set(units)

    def drop(self, *units) -> None:
        for unit in units:
            if unit in self.held:
                self.emit(unit, "free", ())
        self.held -= set(units)


class TracedAdapter(ToyAdapter):
    """Tells of the units."""

    def __init__(self, toy, name) -> None:
        super().__init__(toy, name)
        self.capabilities |= {"unit_trace"}

    def units(self, model):
        return [(unit, tuple(fqn for fqn in model.shards if fqn.startswith(f"{unit}."))) for unit in model.UNITS]

    @contextmanager
    def trace_units(self, model, emit):
        model.emit = emit
        yield


class TwoMeans(Toy):
    """Without shards one rank does not count; with them the sum over ranks is not divided."""

    def contribution(self, fqn):
        mine = super().contribution(fqn)
        return mine * 0 if self.setup.strategy == "no_shard" and self.rank == self.size - 1 else mine

    def mean(self, fqn, contribution):
        return super().mean(fqn, contribution) * (1 if self.setup.strategy == "no_shard" else self.size)


KEEPS_ONE_UNIT = TracedAdapter(KeepsOneUnit, name="KEEPS_ONE_UNIT")
KEEPS_OLD_WEIGHTS = ToyAdapter(KeepsOldWeights, name="KEEPS_OLD_WEIGHTS")
TWO_FAULTS = ToyAdapter(TwoFaults, name="TWO_FAULTS")
TWO_MEANS = ToyAdapter(TwoMeans, name="TWO_MEANS")
