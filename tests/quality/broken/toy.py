"""The smallest correct implementation, which the suites pass: each fault in it stands alone.

Parameters live as flat shards; forward gathers them into the module, the end of backward averages gradients and keeps
the rank's span. No units, no overlap, no memory saved: only the contract. Under `no_shard` every span is the whole.
Broken adapters override one method of `Toy` each (`faults_*.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_testing.adapters.protocol import Division, Piece, Setup
from fsdp_testing.cases.models import tensors_in
from fsdp_testing.cases.records import CAPABILITIES
from fsdp_testing.cases.records.specs import SETTINGS
from fsdp_testing.oracle import models

NOT_CLAIMED = {
    "shard_grad_op", "hybrid", "nested_wrapping", "policy_wrapping", "policy_beside_units", "ignored_parameters", "cpu_offload",
    "full_state_dict", "sharded_state_dict", "local_state_dict", "optim_state", "comm_hook",
    "activation_checkpointing", "reentrant_checkpointing", "meta_init", "dtype_cast",
    "sync_module_states", "unit_trace", "streams", "limited_gathers", "explicit_unshard", "prefetch",
    "exception_recovery", "parameter_replacement",
    "backward_inputs", "tensor_hooks", "accumulation_hooks", "error_if_nonfinite", "dtype_cast_later", "deep_copies",
    "storage_replacement", "modules_replaced", "parameters_replaced", "unit_alone",
    "units_after_forward", "gradient_replacement", "early_hooks", "module_versions", "extra_state",
    "strict_state", "reordered_optimizer", "tensor_parallel", "sub_groups", "compiled", "loss_scaling",
    "whole_parameter_steps", *SETTINGS,
}  # fmt: skip


class Toy(nn.Module):
    """A wrapped model; every step of the contract is a method that a fault can replace."""

    def __init__(self, module: nn.Module, setup: Setup) -> None:
        super().__init__()
        self.inner = module
        self.setup = setup
        self.rank, self.size = setup.rank, setup.world_size
        self.synchronize = True
        self.queued = False
        self.full = dict(module.named_parameters())
        self.shapes = {fqn: tuple(p.shape) for fqn, p in self.full.items()}
        self.shards = {fqn: self.make_shard(fqn, p) for fqn, p in self.full.items()}
        self.sums: dict[str, torch.Tensor] = {}
        self.used: set[str] | None = None
        self.cast_buffers()

    # ---------------------------------------------------------------------------------------- layout

    def span(self, numel: int) -> tuple[int, int]:
        if self.setup.strategy == "no_shard":
            return 0, numel
        chunk = -(-numel // self.size)
        return min(self.rank * chunk, numel), min((self.rank + 1) * chunk, numel)

    def make_shard(self, fqn: str, parameter: nn.Parameter) -> nn.Parameter:
        start, stop = self.span(parameter.numel())
        return nn.Parameter(parameter.detach().reshape(-1)[start:stop].clone(), requires_grad=parameter.requires_grad)

    def cast_buffers(self) -> None:
        dtype = self.setup.precision.buffer_dtype
        for module in self.inner.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if dtype is not None and buffer.is_floating_point():
                    setattr(module, name, buffer.to(dtype))

    # ---------------------------------------------------------------------------------------- forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.unshard()
        counted = {fqn: parameter._version for fqn, parameter in self.full.items()}
        output = self.inner(*self.cast_inputs(args), **self.cast_inputs(kwargs))
        self.keep_edits({fqn for fqn, parameter in self.full.items() if parameter._version != counted[fqn]})
        self.watch(output)
        self.watch_versions(output)
        return output

    def keep_edits(self, edited: set[str]) -> None:
        """What forward changed of its own parameters."""
        for fqn in edited:
            start, stop = self.span(self.full[fqn].numel())
            shard, computed = self.shards[fqn].data, self.full[fqn].detach().reshape(-1)[start:stop]
            # What was not changed keeps the digits that the lower precision of the forward lacks.
            shard.copy_(torch.where(shard.to(computed.dtype) == computed, shard, computed.to(shard.dtype)))

    def watch_versions(self, output: Any) -> None:
        """Refuse a backward of values that were stepped since."""
        versions = [shard._version for shard in self.shards.values()]

        def check(_: torch.Tensor) -> None:
            if versions != [shard._version for shard in self.shards.values()]:
                raise RuntimeError("parameters were modified by an inplace operation since forward")

        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(check)

    def unshard(self) -> None:
        for fqn, parameter in self.full.items():
            whole = self.gather(fqn)
            dtype = self.setup.precision.param_dtype
            if not self.sums:
                parameter.data = (whole if dtype is None else whole.to(dtype)).reshape(self.shapes[fqn])
            else:
                parameter.data.copy_(whole.reshape(self.shapes[fqn]))
            parameter.requires_grad_(self.shards[fqn].requires_grad)

    def gather(self, fqn: str) -> torch.Tensor:
        """The whole parameter, put together by a sum of disjoint spans (zeros elsewhere): exact in every dtype."""
        shard, numel = self.shards[fqn].detach(), self.full[fqn].numel()
        start, stop = self.span(numel)
        if self.setup.strategy == "no_shard":
            return shard.clone()
        whole = torch.zeros(numel, dtype=shard.dtype)
        whole[start:stop] = shard
        self.all_reduce(whole)
        return whole

    def cast_inputs(self, value: Any) -> Any:
        dtype = self.setup.precision.param_dtype
        return value if dtype is None else models.cast_floats(value, dtype)

    # ---------------------------------------------------------------------------------------- backward

    def watch(self, output: Any) -> None:
        """Reduce when the backward of this output is over, whichever of its tensors comes first."""
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self.queue)

    def queue(self, gradient: torch.Tensor) -> None:
        if not self.queued:
            self.queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self.finish_backward)

    def finish_backward(self) -> None:
        self.queued = False
        for fqn, parameter in self.full.items():
            if parameter.grad is not None:
                self.accumulate(fqn, parameter.grad)
                parameter.grad = None
        self.used = None
        if self.synchronize:
            self.reduce()

    def accumulate(self, fqn: str, gradient: torch.Tensor) -> None:
        wider = torch.promote_types(gradient.dtype, self.reduce_dtype(gradient.dtype))
        self.sums[fqn] = self.sums[fqn] + gradient if fqn in self.sums else gradient.to(wider, copy=True)

    def reduce(self) -> None:
        for fqn in self.full:
            if self.used_anywhere(fqn):
                self.store(fqn, self.mean(fqn, self.contribution(fqn)))
        self.sums = {}

    def used_anywhere(self, fqn: str) -> bool:
        if self.used is None:  # one collective of flags for a whole reduction
            flags = torch.tensor([float(name in self.sums) for name in self.full])
            self.all_reduce(flags)
            self.used = {name for name, flag in zip(self.full, flags.tolist()) if flag}
        return fqn in self.used

    def contribution(self, fqn: str) -> torch.Tensor:
        mine = self.sums.get(fqn)
        whole = torch.zeros_like(self.full[fqn]) if mine is None else mine
        return whole.reshape(-1).to(self.reduce_dtype(whole.dtype))

    def reduce_dtype(self, computed: torch.dtype) -> torch.dtype:
        return self.setup.precision.on_the_wire or computed

    def mean(self, fqn: str, contribution: torch.Tensor) -> torch.Tensor:
        total = contribution.clone()
        self.all_reduce(total)
        return total / self.size

    def store(self, fqn: str, mean: torch.Tensor) -> None:
        shard = self.shards[fqn]
        start, stop = self.span(mean.numel())
        piece = mean[start:stop].to(shard.dtype)
        shard.grad = piece.clone() if shard.grad is None else shard.grad + piece

    def all_reduce(self, tensor: torch.Tensor) -> None:
        if self.size > 1:
            dist.all_reduce(tensor, group=self.setup.group)

    # ---------------------------------------------------------------------------------------- around

    def zero_grad(self, set_to_none: bool = True) -> None:
        for shard in self.shards.values():
            if set_to_none or shard.grad is None:
                shard.grad = None
            else:
                shard.grad.zero_()

    def clear_sums(self, set_to_none: bool) -> None:
        self.sums = {} if set_to_none else {fqn: held * 0 for fqn, held in self.sums.items()}

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self.synchronize = self.synchronize, False
        try:
            yield
        finally:
            self.synchronize = before

    def clip(self, max_norm: float, norm_type: float) -> torch.Tensor:
        norm = self.total_norm(norm_type)
        self.scale(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def scale(self, coefficient: torch.Tensor) -> None:
        for shard in self.shards.values():
            if shard.grad is not None:
                shard.grad.mul_(coefficient.to(shard.grad.dtype))

    def total_norm(self, norm_type: float) -> torch.Tensor:
        grads = [shard.grad.double() for shard in self.shards.values() if shard.grad is not None and shard.grad.numel()]
        sharded = self.setup.strategy != "no_shard"
        if norm_type == float("inf"):
            norm = torch.stack([torch.zeros((), dtype=torch.float64), *(g.abs().max() for g in grads)]).max()
            if sharded:
                nothing = norm.isnan().double()  # what the maximum makes of it depends on its place
                self.all_reduce(nothing)
                dist.all_reduce(norm, dist.ReduceOp.MAX, group=self.setup.group)
                norm = torch.where(nothing > 0, torch.nan, norm)
            return norm
        total = sum(((g.abs() ** norm_type).sum() for g in grads), torch.tensor(0.0, dtype=torch.float64))
        if sharded:
            self.all_reduce(total)
        return total ** (1 / norm_type)

    @contextmanager
    def full_parameters(self, *, writeback: bool) -> Iterator[Mapping[str, torch.Tensor]]:
        whole = {fqn: self.gather(fqn).reshape(self.shapes[fqn]) for fqn in self.full}
        yield whole
        if writeback:
            self.write_back(whole)

    def write_back(self, whole: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for fqn, tensor in whole.items():
                start, stop = self.span(tensor.numel())
                self.shards[fqn].copy_(tensor.reshape(-1)[start:stop])

    def pieces(self, fqn: str, value: torch.Tensor, gradient: torch.Tensor | None) -> tuple[Piece, ...]:
        numel = self.full[fqn].numel()
        start, stop = self.span(numel)
        flag = self.shards[fqn].requires_grad
        return (Piece(self.shapes[fqn], start, stop, value.detach(), gradient, requires_grad=flag),)


class ToyAdapter:
    """The adapter of a `Toy` class: nothing is added to it."""

    def __init__(self, toy: type[Toy], name: str = "toy") -> None:
        self.name = name
        self.toy = toy
        self.capabilities = frozenset(CAPABILITIES) - NOT_CLAIMED

    def wrap(self, module: nn.Module, setup: Setup) -> nn.Module:
        return self.toy(module, setup)

    def no_sync(self, model: Toy) -> Any:
        return model.no_sync()

    def clip_grad_norm(self, model: Toy, max_norm: float, norm_type: float) -> torch.Tensor:
        return model.clip(max_norm, norm_type)

    def full_parameters(self, model: Toy, *, writeback: bool) -> Any:
        return model.full_parameters(writeback=writeback)

    def zero_grad(self, model: Toy, optimizer: torch.optim.Optimizer | None, set_to_none: bool) -> None:
        (optimizer or model).zero_grad(set_to_none)
        model.clear_sums(set_to_none)

    def local_pieces(self, model: Toy) -> dict[str, tuple[Piece, ...]]:
        return {fqn: model.pieces(fqn, shard, shard.grad) for fqn, shard in model.shards.items()}

    def optimizer_pieces(self, model: Toy, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for fqn, shard in model.shards.items():
            for name, value in optimizer.state.get(shard, {}).items():
                if isinstance(value, torch.Tensor) and name != "step":
                    found.setdefault(fqn, {})[name] = model.pieces(fqn, value, None)
                elif value is not None:
                    found.setdefault(fqn, {})[name] = float(value)
        return found

    def named_parameters(self, model: Toy) -> list[tuple[str, nn.Parameter]]:
        return list(model.shards.items())

    def named_buffers(self, model: Toy) -> list[tuple[str, torch.Tensor]]:
        return list(model.inner.named_buffers())

    def division(self, setup: Setup) -> Division:
        return Division(before=1.0, after=float(setup.world_size))


UNBROKEN = ToyAdapter(Toy)
