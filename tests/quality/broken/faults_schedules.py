"""Faults in what happens between micro-batches: forwards in between, cleared gradients, steps, late optimizers."""

from __future__ import annotations

from typing import Any

import torch
from fault import fault
from torch import nn
from toy import Toy


@fault("accumulation.several_forwards")
class SecondBackwardStaysLocal(Toy):
    """A backward that no forward came before since the last one is not reduced (B159)."""

    fresh = False

    def watch(self, output: Any) -> None:
        self.fresh = self.fresh or torch.is_grad_enabled()
        super().watch(output)

    def mean(self, fqn: str, contribution: torch.Tensor) -> torch.Tensor:
        mean = super().mean(fqn, contribution)
        return mean if self.fresh else contribution

    def reduce(self) -> None:
        super().reduce()
        self.fresh = False


@fault("accumulation.forward_between")
class LookForgetsLocal(Toy):
    """A forward in evaluation mode forgets what no_sync has collected."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if not self.inner.training:
            self.sums = {}
        return output


@fault("accumulation.clipped")
class NormOfTheLast(Toy):
    """The norm is that of the last reduction alone; what no_sync collected does not count."""

    last: dict[str, torch.Tensor]

    def finish_backward(self) -> None:
        self.last = {f: p.grad.reshape(-1).clone() for f, p in self.full.items() if p.grad is not None}
        super().finish_backward()

    def total_norm(self, norm_type: float) -> torch.Tensor:
        means = [self.mean(fqn, gradient).double() for fqn, gradient in self.last.items()]
        return torch.linalg.vector_norm(torch.cat(means), norm_type)


@fault("training.same_batch_twice")
class SameGradientOnce(Toy):
    """A gradient that equals the one before it is taken for the same and not added."""

    def store(self, fqn: str, mean: torch.Tensor) -> None:
        start, stop = self.span(mean.numel())
        held = self.shards[fqn].grad
        if held is None or not torch.equal(held, mean[start:stop].to(held.dtype)):
            super().store(fqn, mean)


@fault("training.late_optimizer")
class ShardsReplaced(Toy):
    """The first backward replaces the parameters by others, which an optimizer built before does not hold."""

    replaced = False

    def finish_backward(self) -> None:
        super().finish_backward()
        if self.replaced:
            return
        self.replaced = True
        for fqn, shard in list(self.shards.items()):
            self.shards[fqn] = nn.Parameter(shard.detach().clone(), requires_grad=shard.requires_grad)
            self.shards[fqn].grad = shard.grad


@fault("training.adamw_weight_decay")
class DecaysZeros(Toy):
    """Gradients smaller than the last bits of the largest are dropped to zero."""

    def store(self, fqn: str, mean: torch.Tensor) -> None:
        super().store(fqn, mean.where(mean.abs() > 1e-2 * mean.abs().max(), mean * 0) if mean.numel() else mean)


@fault("zero_grad.before_first_backward")
class ZeroGradMakesOnes(Toy):
    """Clearing what is not there leaves zeros where there was None."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)

    def make_shard(self, fqn: str, parameter: nn.Parameter) -> nn.Parameter:
        shard = super().make_shard(fqn, parameter)
        shard.grad = torch.zeros_like(shard) if shard.requires_grad else None
        return shard


@fault("zero_grad.between_forwards")
class ClearedComesBack(Toy):
    """Two forwards without backward after a step bring the cleared gradient back."""

    forwards = 0

    def watch(self, output: Any) -> None:
        self.forwards += 1
        super().watch(output)

    def reduce(self) -> None:
        super().reduce()
        before: dict[str, torch.Tensor] = self.__dict__.setdefault("before", {})
        for fqn, shard in self.shards.items():
            if shard.grad is not None and self.forwards > 2 and fqn in before:
                shard.grad.add_(before[fqn])
            if shard.grad is not None:
                before[fqn] = shard.grad.clone()
        self.forwards = 0


@fault("zero_grad.then_step")
class ZerosAreNone(Toy):
    """After a reduction, gradients that were cleared to zeros are dropped before anybody can step on them."""

    def pieces(self, fqn: str, value: torch.Tensor, gradient: torch.Tensor | None) -> Any:
        shard = self.shards[fqn]
        if shard.grad is not None and not bool(shard.grad.any()):
            shard.grad = gradient = None
        return super().pieces(fqn, value, gradient)


@fault("forward_only.modes_mixed")
class EvalAfterNoGradStale(Toy):
    """An evaluation in grad mode uses what the last one under no_grad gathered."""

    def unshard(self) -> None:
        super().unshard()
        kept: dict[str, torch.Tensor] = self.__dict__.setdefault("kept", {})
        for fqn, parameter in self.full.items():
            if not torch.is_grad_enabled():
                kept[fqn] = parameter.data.clone()
            elif not self.inner.training and fqn in kept:
                parameter.data = kept[fqn]
