"""Adapters for tests of explanations: one module of the plain stack computes, or is reduced, wrongly."""

from __future__ import annotations

import torch
from toy import Toy, ToyAdapter

MODULE = "layers.1"


def part(module, name):
    """The module of that name; in a model that has none, one that nobody calls."""
    return dict(module.named_modules()).get(name, torch.nn.Identity())


class WrongGradient(Toy):
    """On rank 1 the gradient of one weight is a tenth too large."""

    def mean(self, fqn, contribution):
        mean = super().mean(fqn, contribution)
        return mean * 1.1 if fqn == f"{MODULE}.weight" and self.rank == 1 else mean


class WrongOutput(Toy):
    """On rank 1 one module gives a tenth more than it computes."""

    def __init__(self, module, setup):
        super().__init__(module, setup)
        if setup.rank == 1:
            part(module, MODULE).register_forward_hook(lambda module, args, output: output * 1.1)


class WrongBackward(Toy):
    """The gradient that goes back into one module from those after it is a tenth too large."""

    def __init__(self, module, setup):
        super().__init__(module, setup)
        part(module, "layers.2").register_forward_pre_hook(lambda module, args: (Larger.apply(args[0]),))


class Larger(torch.autograd.Function):
    """The same numbers, and a larger gradient."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1.1


class WrongStep(Toy):
    """Gradients are right, and a forward without gradients adds to one weight."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        shard = self.shards.get(f"{MODULE}.weight")
        if not self.inner.training and shard is not None:
            shard.data.add_(0.1)
        return output


class Shy(WrongGradient):
    """The gradient is right as soon as somebody watches the module."""

    def mean(self, fqn, contribution):
        watched = bool(part(self.inner, MODULE)._forward_pre_hooks)
        return Toy.mean(self, fqn, contribution) if watched else super().mean(fqn, contribution)


WRONG_GRADIENT, WRONG_OUTPUT, WRONG_BACKWARD, WRONG_STEP, SHY = (
    ToyAdapter(kind, name=kind.__name__) for kind in (WrongGradient, WrongOutput, WrongBackward, WrongStep, Shy)
)
