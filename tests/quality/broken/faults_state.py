"""Faults in where parameters, buffers and norms live, and in which dtype."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from fault import fault
from torch import nn
from toy import Toy, ToyAdapter


@fault("construction.keeps_numbers")
class WrapRounds(Toy):
    """Wrapping rounds parameters to float32."""

    def make_shard(self, fqn: str, parameter: nn.Parameter) -> nn.Parameter:
        shard = super().make_shard(fqn, parameter)
        shard.data = shard.data.float().to(shard.dtype)
        return shard


@fault("construction.keeps_numbers")
class WrapTrainsEverything(Toy):
    """Wrapping a bias sets requires_grad to False."""

    def make_shard(self, fqn: str, parameter: nn.Parameter) -> nn.Parameter:
        return super().make_shard(fqn, parameter).requires_grad_(not fqn.endswith("bias"))


@fault("forward_only.no_grad")
class StaleAfterNoGrad(Toy):
    """Parameters gathered by a forward without gradients are used again, also after a step."""

    def unshard(self) -> None:
        if not getattr(self, "kept", False):
            super().unshard()
        self.kept = not torch.is_grad_enabled()


@fault("accumulation.fresh_weights")
class StaleAfterNoSync(Toy):
    """Parameters gathered in no_sync are kept for the next forward but one."""

    def unshard(self) -> None:
        if getattr(self, "keep", 0) <= 0:
            super().unshard()
        self.keep = 2 if not self.synchronize else getattr(self, "keep", 0) - 1


@fault("forward_only.eval")
class EvalClearsGradients(Toy):
    """An evaluation clears the gradients that wait for a step."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.inner.training:
            self.zero_grad()
        return super().forward(*args, **kwargs)


@fault("forward_only.train")
class ForwardCountsTwice(Toy):
    """A forward whose output is dropped makes the next backward count twice."""

    def watch(self, output: Any) -> None:
        self.forwards = getattr(self, "forwards", 0) + 1
        super().watch(output)

    def reduce(self) -> None:
        self.sums = {fqn: gradient * self.forwards for fqn, gradient in self.sums.items()}
        self.forwards = 0
        super().reduce()


@fault("forward_only.inference")
class InferencePoisons(Toy):
    """Parameters made under inference_mode are kept for training."""

    def unshard(self) -> None:
        if torch.is_inference_mode_enabled():
            self.full = {fqn: nn.Parameter(p.detach().clone()) for fqn, p in self.full.items()}
            return
        super().unshard()


@fault("buffers.kept")
class BuffersCast(Toy):
    """Floating buffers are cast to float32 although nobody asked."""

    def cast_buffers(self) -> None:
        for module in self.inner.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.dtype == torch.float64:
                    setattr(module, name, buffer.float())


@fault("mixed_precision.buffers")
class BufferDtypeLost(Toy):
    """Only the first floating buffer of each module is cast (B064)."""

    def cast_buffers(self) -> None:
        dtype = self.setup.precision.buffer_dtype
        for module in self.inner.modules():
            names = [name for name, b in module.named_buffers(recurse=False) if b.is_floating_point()]
            for name in names[:1] if dtype is not None else []:
                setattr(module, name, module.get_buffer(name).to(dtype))


@fault("buffers.statistics")
class BuffersAveraged(Toy):
    """Floating buffers are averaged over the ranks after each forward."""

    def watch(self, output: Any) -> None:
        for buffer in self.inner.buffers():
            if buffer.is_floating_point():
                self.all_reduce(buffer.div_(self.size))
        super().watch(output)


@fault("sizes.uneven")
class PaddingInside(Toy):
    """Sizes are rounded up and the padding overwrites the last element."""

    def gather(self, fqn: str) -> torch.Tensor:
        whole = super().gather(fqn)
        if whole.numel() % self.size and whole.numel() > 1:
            whole[-1] = 0.0
        return whole


@fault("sizes.fewer_elements_than_ranks")
class EmptyShardReadsZero(Toy):
    """A parameter with fewer elements than ranks is gathered as zeros on the ranks that hold none of it."""

    def gather(self, fqn: str) -> torch.Tensor:
        whole = super().gather(fqn)
        return whole * 0 if self.shards[fqn].numel() == 0 and whole.numel() else whole


@fault("sizes.strided")
class StorageOrder(Toy):
    """A parameter that is not contiguous is cut in the order of its storage."""

    def make_shard(self, fqn: str, parameter: nn.Parameter) -> nn.Parameter:
        flat = parameter.detach().as_strided((parameter.numel(),), (1,))
        start, stop = self.span(parameter.numel())
        return nn.Parameter(flat[start:stop].clone(), requires_grad=parameter.requires_grad)


@fault("mixed_precision.reduce_float32")
class WrongReduceDtype(Toy):
    """Gradients are reduced in param_dtype although reduce_dtype says otherwise (B004)."""

    def reduce_dtype(self, computed: torch.dtype) -> torch.dtype:
        return self.setup.precision.param_dtype or super().reduce_dtype(computed)


@fault("mixed_precision.param_bfloat16")
class ReduceInFullPrecision(Toy):
    """Gradients are reduced in float32 although nothing but param_dtype was given (B004)."""

    def reduce_dtype(self, computed: torch.dtype) -> torch.dtype:
        return self.setup.precision.reduce_dtype or torch.float32


@fault("mixed_precision.reduce_bfloat16")
class ReduceDtypeNeedsParamDtype(Toy):
    """reduce_dtype alone is ignored."""

    def reduce_dtype(self, computed: torch.dtype) -> torch.dtype:
        return super().reduce_dtype(computed) if self.setup.precision.param_dtype else computed


@fault("mixed_precision.param_bfloat16")
class StoredLow(Toy):
    """Parameters are rounded to param_dtype where they are stored."""

    def make_shard(self, fqn: str, parameter: nn.Parameter) -> nn.Parameter:
        shard = super().make_shard(fqn, parameter)
        shard.data = shard.data.to(self.setup.precision.param_dtype or shard.dtype).to(shard.dtype)
        return shard


@fault("mixed_precision.evaluated")
class EvalInFullPrecision(Toy):
    """Evaluation does not cast."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.inner.training:
            return super().forward(*args, **kwargs)
        for fqn, parameter in self.full.items():
            parameter.data = self.gather(fqn).reshape(self.shapes[fqn])
        return self.inner(*args, **kwargs)


@fault("clipping.norm_2")
class LocalNorm(Toy):
    """The norm is that of the rank's own shard."""

    def total_norm(self, norm_type: float) -> torch.Tensor:
        grads = [shard.grad for shard in self.shards.values() if shard.grad is not None and shard.grad.numel()]
        return torch.linalg.vector_norm(torch.cat(grads), norm_type).double()


@fault("clipping.norm_2")
class ReplicatedCountedOften(Toy):
    """Replicated gradients count once per rank (B054)."""

    def total_norm(self, norm_type: float) -> torch.Tensor:
        replicas = self.size if self.setup.strategy == "no_shard" else 1
        return super().total_norm(norm_type) * replicas ** (1 / norm_type)


@fault("clipping.norm_inf")
class InfinityAsPower(Toy):
    """The infinity norm is formed by raising to the power 1/p, which gives 1 (B059)."""

    def total_norm(self, norm_type: float) -> torch.Tensor:
        norm = super().total_norm(norm_type)
        return norm ** (1 / norm_type) if norm_type == float("inf") else norm


@fault("clipping.norm_1")
class PaddingInNorm(Toy):
    """Padding counts in the norm."""

    def total_norm(self, norm_type: float) -> torch.Tensor:
        odd = sum(parameter.numel() % self.size for parameter in self.full.values())
        return super().total_norm(norm_type) + odd * 1e-3


@fault("clipping.not_needed")
class AlwaysScales(Toy):
    """Gradients below the limit are scaled up to it."""

    def clip(self, max_norm: float, norm_type: float) -> torch.Tensor:
        norm = self.total_norm(norm_type)
        self.scale(max_norm / (norm + 1e-6))
        return norm


@fault("clipping.norm_3")
class OnlyTwoNorm(Toy):
    """Every norm is the 2-norm."""

    def total_norm(self, norm_type: float) -> torch.Tensor:
        return super().total_norm(2.0)


@fault("summon.edits_are_kept")
class EditsLost(Toy):
    """Edits of full parameters are not written back."""

    def write_back(self, whole: Mapping[str, torch.Tensor]) -> None:
        del whole


@fault("summon.edits_are_kept")
class FirstRankWritesOnly(Toy):
    """Only rank 0 writes its span back."""

    def write_back(self, whole: Mapping[str, torch.Tensor]) -> None:
        if self.rank == 0:
            super().write_back(whole)


@fault("summon.edits_are_kept")
class ShownWithoutAGather(Toy):
    """A rank is shown its own span of full parameters, and zeros beside it."""

    @contextmanager
    def full_parameters(self, *, writeback: bool) -> Iterator[Mapping[str, torch.Tensor]]:
        with super().full_parameters(writeback=writeback) as whole:
            for parameter in whole.values():
                start, stop = self.span(parameter.numel())
                parameter.view(-1)[:start] = parameter.view(-1)[stop:] = 0.0
            yield whole


@fault("summon.edits_are_discarded")
class ShownWrongToReaders(Toy):
    """Who only reads full parameters after a forward is shown NaN."""

    ran = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.ran = True
        return super().forward(*args, **kwargs)

    @contextmanager
    def full_parameters(self, *, writeback: bool) -> Iterator[Mapping[str, torch.Tensor]]:
        with super().full_parameters(writeback=writeback) as whole:
            for parameter in whole.values() if self.ran and not writeback else ():
                parameter.fill_(float("nan"))
            yield whole


@fault("summon.between_backward_and_step")
class SummonClearsGradients(Toy):
    """Writing back drops gradients that wait for a step."""

    def write_back(self, whole: Mapping[str, torch.Tensor]) -> None:
        super().write_back(whole)
        self.zero_grad()


class _StateOfOneName(ToyAdapter):
    """Reports Adam's second moment as its first (B083)."""

    def optimizer_pieces(self, model: Toy, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
        found = super().optimizer_pieces(model, optimizer)
        for entries in found.values():
            if "exp_avg_sq" in entries:
                entries["exp_avg"] = entries["exp_avg_sq"]
        return found


class _RaisesOnOneRank(Toy):
    """Rank 1 raises in its second forward while the others go on."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        if self.rank == 1 and self.calls == 2:
            raise RuntimeError("only here")
        return super().forward(*args, **kwargs)


class _NotImplemented(Toy):
    """Claims clipping and has none."""

    def clip(self, max_norm: float, norm_type: float) -> torch.Tensor:
        raise NotImplementedError("clipping is not there yet")


STATE_OF_ONE_NAME = _StateOfOneName(Toy, "STATE_OF_ONE_NAME")
RAISES_ON_ONE_RANK = ToyAdapter(_RaisesOnOneRank, "RAISES_ON_ONE_RANK")
NOT_IMPLEMENTED = ToyAdapter(_NotImplemented, "NOT_IMPLEMENTED")
