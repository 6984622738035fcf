"""Faults in recomputation, prefetch, exceptions, hooks, conversion, and beside DDP."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from fault import fault
from planting import planted
from toy_more import MoreToy

from fsdp_ref.api import fully_shard
from fsdp_testing.cases.operations.unusual_backwards import Interruption


def _recomputing(model: MoreToy) -> list[str]:
    """FQNs of parameters inside modules that are recomputed."""
    inside = "._checkpoint_wrapped_module."
    names = [fqn for fqn, _ in model.inner.named_parameters() if inside in f".{fqn}"]
    return [fqn.replace("_checkpoint_wrapped_module.", "") for fqn in names]


@fault("activation_checkpointing.inside_units")
class CountsRecomputed(MoreToy):
    """Gradients of recomputed modules count twice (B035)."""

    def contribution(self, fqn: str) -> torch.Tensor:
        return super().contribution(fqn) * (2 if fqn in _recomputing(self) else 1)


@fault("activation_checkpointing.hidden")
class KeptCountsTwice(MoreToy):
    """Gradients of a recomputed module that keeps a tensor for its caller count twice."""

    def contribution(self, fqn: str) -> torch.Tensor:
        keeps = any(hasattr(module, "take") for module in self.inner.modules()) and fqn in _recomputing(self)
        return super().contribution(fqn) * (2 if keeps else 1)


@fault("activation_checkpointing.around_units")
class RecomputedOffByAnUlp(MoreToy):
    """A gradient of a recomputed unit is off by one unit in the last place."""

    def store_piece(self, fqn: str, piece: torch.Tensor) -> None:
        super().store_piece(fqn, torch.nextafter(piece, piece + 1) if fqn in _recomputing(self) else piece)

    def store(self, fqn: str, mean: torch.Tensor) -> None:
        super().store(fqn, torch.nextafter(mean, mean + 1) if fqn in _recomputing(self) else mean)


@fault("activation_checkpointing.reentrant_inside")
class ReentrantNotReduced(MoreToy):
    """Gradients from inside a reentrant region stay those of the rank (B034)."""

    def used_anywhere(self, fqn: str) -> bool:
        return super().used_anywhere(fqn) and not (self.setup.checkpoint_reentrant and fqn in _recomputing(self))


@fault("activation_checkpointing.reentrant_around")
class ReentrantOutsideNotReduced(MoreToy):
    """Gradients of units inside a reentrant region stay those of the rank (B034)."""

    def used_anywhere(self, fqn: str) -> bool:
        return super().used_anywhere(fqn) and fqn not in _recomputing(self)


@fault("activation_checkpointing.accumulated")
class RecomputedReplaces(MoreToy):
    """A recomputed micro-batch replaces those before it."""

    def accumulate(self, fqn: str, gradient: torch.Tensor) -> None:
        if fqn in _recomputing(self):
            self.sums.pop(fqn, None)
        super().accumulate(fqn, gradient)


@fault("activation_checkpointing.mixed_precision")
class RecomputesInFull(MoreToy):
    """Recomputed modules reduce in bfloat16 whatever was asked."""

    def contribution(self, fqn: str) -> torch.Tensor:
        mine = super().contribution(fqn)
        return mine * 1.01 if fqn in _recomputing(self) else mine


class _Prefetching(MoreToy):
    """Takes what it gathered ahead."""

    ahead: dict[str, torch.Tensor] | None = None

    def take_ahead(self) -> None:
        self.ahead = {fqn: super(_Prefetching, self).gather(fqn) for fqn in self.full}

    def gather(self, fqn: str) -> torch.Tensor:
        return super().gather(fqn) if self.ahead is None else self.ahead[fqn]


@fault("prefetch.every_kind")
class GatheredTooEarly(_Prefetching):
    """With forward prefetch, parameters are gathered after backward, before the step that changes them."""

    def finish_backward(self) -> None:
        super().finish_backward()
        if self.setup.forward_prefetch:
            self.take_ahead()


@fault("prefetch.accumulated")
class PostWaitsForNothing(MoreToy):
    """With backward prefetch after the unit, a micro-batch inside no_sync is lost."""

    def accumulate(self, fqn: str, gradient: torch.Tensor) -> None:
        if self.synchronize or self.setup.backward_prefetch != "post":
            super().accumulate(fqn, gradient)


@fault("prefetch.every_kind")
class NoneMeansNever(MoreToy):
    """Without backward prefetch the last parameter is not reduced."""

    def used_anywhere(self, fqn: str) -> bool:
        return super().used_anywhere(fqn) and not (
            self.setup.backward_prefetch == "none" and fqn == list(self.full)[-1]
        )


@fault("exceptions.in_backward")
class QueuedForEver(MoreToy):
    """A backward that raised counts as running: nothing is reduced again."""

    def forget_interrupted(self) -> None:
        for parameter in self.full.values():
            parameter.grad = None


@fault("exceptions.repeatedly")
class PartialGradientsStay(MoreToy):
    """Gradients of a backward that raised are added to the next."""

    def forget_interrupted(self) -> None:
        self.queued = False


@fault("exceptions.in_forward")
class Swallows(MoreToy):
    """What the user's module raises in forward does not reach who called the model."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().forward(*args, **kwargs)
        except Interruption:
            return torch.zeros(3, dtype=torch.float64)


@fault("exceptions.in_forward")
class ForwardStaysOpen(MoreToy):
    """A forward that raised makes the next one return early: its backward is not watched."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.depth = getattr(self, "depth", 0) + 1
        output = super().forward(*args, **kwargs)
        self.depth -= 1
        return output

    def watch(self, output: Any) -> None:
        if self.depth == 1:
            super().watch(output)


@fault("exceptions.in_no_sync")
class NoSyncNeverEnds(MoreToy):
    """An exception inside no_sync leaves reduction off."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.synchronize = False
        yield
        self.synchronize = True


@fault("exceptions.in_summon")
class SummonNeverEnds(MoreToy):
    """An exception while parameters are gathered leaves the model computing with what was gathered then."""

    open = False

    @contextmanager
    def full_parameters(self, *, writeback: bool) -> Iterator[Mapping[str, torch.Tensor]]:
        self.open = True
        with super().full_parameters(writeback=writeback) as full:
            yield full
        self.open = False

    def unshard(self) -> None:
        if not self.open or not getattr(self, "once", False):
            super().unshard()
        self.once = self.open


class _WithHook(MoreToy):
    """Whose hook faults are distinguished by name."""


@fault("comm_hook.not_in_no_sync")
class HookInNoSync(_WithHook):
    """The hook is called for local micro-batches too."""

    def finish_backward(self) -> None:
        super().finish_backward()
        if not self.synchronize and self.hook is not None:
            flat = torch.cat([gradient.reshape(-1) for gradient in self.sums.values()])
            room = flat.new_zeros(-(-flat.numel() // self.size) * self.size)
            self.call_hook(
                room, None if self.setup.strategy == "no_shard" else room[: room.numel() // self.size].clone()
            )


@fault("comm_hook.called_once_per_unit")
class HookTwice(_WithHook):
    """The hook is called twice for a unit; the second result counts."""

    def call_hook(self, flat: torch.Tensor, output: torch.Tensor | None) -> None:
        super().call_hook(flat.clone(), None if output is None else output.clone())
        super().call_hook(flat, output)


@fault("comm_hook.called_once_per_unit")
class DividedBeforeHook(_WithHook):
    """The gradient is divided before the hook and multiplied after it."""

    def call_hook(self, flat: torch.Tensor, output: torch.Tensor | None) -> None:
        flat /= 2
        super().call_hook(flat, output)
        (flat if output is None else output).mul_(2)


@fault("comm_hook.result_is_kept")
class HookResultIgnored(_WithHook):
    """The hook is called, and the built-in mean is taken."""

    def average(self, flat: torch.Tensor, output: torch.Tensor | None) -> torch.Tensor:
        if self.hook is not None:
            self.call_hook(flat.clone(), None if output is None else output.clone())
        hook, self.hook = self.hook, None
        mean = super().average(flat, output)
        self.hook = hook
        return mean


@fault("comm_hook.averages")
class MeanAfterHook(_WithHook):
    """What the hook returns is divided by the number of ranks."""

    def call_hook(self, flat: torch.Tensor, output: torch.Tensor | None) -> None:
        super().call_hook(flat, output)
        (flat if output is None else output).div_(self.size)


@fault("comm_hook.bfloat16")
class HookLosesBits(_WithHook):
    """What the hook is given was rounded to float16."""

    def call_hook(self, flat: torch.Tensor, output: torch.Tensor | None) -> None:
        flat.copy_(flat.half())
        super().call_hook(flat, output)


@fault("comm_hook.float16")
class HookResultRounded(_WithHook):
    """What the hook returns is rounded to bfloat16."""

    def call_hook(self, flat: torch.Tensor, output: torch.Tensor | None) -> None:
        super().call_hook(flat, output)
        kept = flat if output is None else output
        kept.copy_(kept.bfloat16())


@fault("conversion.dtype")
class CastForgetsShards(MoreToy):
    """`module.to(dtype)` casts what is gathered and not what is stored."""

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        kept = {fqn: shard.data for fqn, shard in self.shards.items()}
        super()._apply(fn, recurse)
        for fqn, shard in self.shards.items():
            shard.data = kept[fqn]
        return self


@fault("conversion.same_device")
class MovingRestoresGradients(MoreToy):
    """`module.to` gives back the gradients that zero_grad has cleared."""

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        for shard in self.shards.values():
            shard.grad = torch.ones_like(shard)
        return super()._apply(fn, recurse)


@fault("conversion.deepcopy")
class CopyShares(MoreToy):
    """A deep copy shares the shards with the original."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.copy(self)


@fault("conversion.deepcopy")
class OneRankCopies(MoreToy):
    """All ranks but the first refuse to be copied: it would wait for them in its copy's first collective."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self.rank:
            raise RuntimeError("cannot be copied")
        return copy.copy(self)


@fault("conversion.deepcopy")
class CopyDoesNotReduce(MoreToy):
    """A deep copy trains on each rank by itself."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module = copy.deepcopy(self.inner, memo)
        with torch.no_grad():
            for fqn, parameter in module.named_parameters():
                parameter.copy_(self.gather(fqn).reshape(self.shapes[fqn]))
        twin = type(self)(module, self.setup)
        twin.mean_of_none = True
        return twin

    def average(self, flat: torch.Tensor, output: torch.Tensor | None) -> torch.Tensor:
        mean = super().average(flat, output)
        return mean * 2 if getattr(self, "mean_of_none", False) else mean


@fault("conversion.dtype_of_buffers")
class CastForgetsBuffers(MoreToy):
    """`module.to(dtype)` leaves buffers as they are."""

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        kept = [(m, name, b) for m in self.inner.modules() for name, b in m.named_buffers(recurse=False)]
        super()._apply(fn, recurse)
        for module, name, buffer in kept:
            setattr(module, name, buffer)
        return self


@fault("beside_ddp.no_sync")
class LastLocalRescaled(MoreToy):
    """Local micro-batches count half."""

    def accumulate(self, fqn: str, gradient: torch.Tensor) -> None:
        super().accumulate(fqn, gradient if self.synchronize else gradient / 2)


@fault("beside_ddp.mixed_precision")
class ReducesInParamDtype(MoreToy):
    """Gradients are reduced in param_dtype whatever reduce_dtype says (B004)."""

    def reduce_dtype(self, computed: torch.dtype) -> torch.dtype:
        return computed


@fault("beside_ddp.offload")
class OffloadedDrift(MoreToy):
    """Gradients that live on the CPU are rounded to float32."""

    def reduce_together(self, fqns: list[str]) -> None:
        super().reduce_together(fqns)
        for shard in self.shards.values() if self.setup.cpu_offload else ():
            if shard.grad is not None:
                shard.grad = shard.grad.float().to(shard.dtype)


@fault("beside_ddp.offload_no_sync")
class OffloadedReplaces(MoreToy):
    """With offload the last micro-batch replaces those before it (B029)."""

    def accumulate(self, fqn: str, gradient: torch.Tensor) -> None:
        if self.setup.cpu_offload:
            self.sums.pop(fqn, None)
        super().accumulate(fqn, gradient)


@planted("fsdp_ref-composable", fully_shard, "_begin_backward", "wrapping.backward_pre_hooks")
def gathers_after_the_users_hook(_original: Any, _module: Any, _grads: Any) -> None:
    """A backward pre-hook of the user's on a unit reads this rank's piece of the weight."""
