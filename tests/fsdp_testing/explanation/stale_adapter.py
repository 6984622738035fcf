"""Adapters for tests of explanations: weights of before a step that are still in use, alone and beside another fault."""

from __future__ import annotations

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


KEEPS_OLD_WEIGHTS = ToyAdapter(KeepsOldWeights, name="KEEPS_OLD_WEIGHTS")
TWO_FAULTS = ToyAdapter(TwoFaults, name="TWO_FAULTS")
