"""The smallest implementation that can also save, load, copy, recompute, trace and be hooked.

Everything that `Toy` leaves out and the later suites ask for. Again each step is a method that a fault can replace.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from toy import Toy, ToyAdapter

from fsdp_testing.adapters.protocol import Setup
from fsdp_testing.adapters.shared.checkpointing import checkpoint_modules

MORE = frozenset(
    {
        "full_state_dict", "sharded_state_dict", "local_state_dict", "optim_state", "comm_hook",
        "activation_checkpointing", "reentrant_checkpointing", "exception_recovery", "unit_trace", "prefetch",
        "cpu_offload", "dtype_cast", "dtype_cast_later", "sub_groups", "reordered_optimizer",
    }
)  # fmt: skip
_GATHER: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SCATTER: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class MoreToy(Toy):
    """One unit, gathered and reduced as one flat tensor."""

    def __init__(self, module: nn.Module, setup: Setup) -> None:
        self.hook: Callable[..., Any] | None = None
        self.hook_state: Any = None
        self.emit: Callable[[str, str, tuple[str, ...]], None] = lambda unit, transition, fqns: None
        checkpoint_modules(module, setup.checkpointed, reentrant=setup.checkpoint_reentrant)
        super().__init__(module, setup)
        self.full = {fqn.replace("_checkpoint_wrapped_module.", ""): p for fqn, p in self.full.items()}
        self.shapes = {fqn: tuple(p.shape) for fqn, p in self.full.items()}
        self.shards = {fqn: self.make_shard(fqn, p) for fqn, p in self.full.items()}

    # ---------------------------------------------------------------------------------------- gathering

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.forget_interrupted()
        output = super().forward(*args, **kwargs)
        if not torch.is_grad_enabled():
            self.release()
        return output

    def forget_interrupted(self) -> None:
        """What a backward that raised has left."""
        self.queued = False
        for parameter in self.full.values():
            parameter.grad = None

    def unshard(self) -> None:
        self.emit("", "unshard", ())
        super().unshard()
        if self.setup.strategy != "no_shard":
            self.emit("", "gather", ())

    def release(self) -> None:
        self.emit("", "reshard", ())
        if self.setup.strategy != "no_shard":
            self.emit("", "free", ())

    def gather(self, fqn: str) -> torch.Tensor:
        shard, numel = self.shards[fqn].detach(), self.full[fqn].numel()
        if self.setup.strategy == "no_shard":
            return shard.clone()
        chunk = -(-numel // self.size)
        mine = torch.zeros(chunk, dtype=shard.dtype)
        mine[: shard.numel()] = shard
        whole = torch.empty(chunk * self.size, dtype=shard.dtype)
        self.all_gather(whole, mine)
        return whole[:numel].clone()

    def all_gather(self, whole: torch.Tensor, mine: torch.Tensor) -> None:
        _GATHER(whole, mine, group=self.setup.group)

    # ---------------------------------------------------------------------------------------- reducing

    def finish_backward(self) -> None:
        super().finish_backward()
        self.release()

    def used_anywhere(self, fqn: str) -> bool:
        """Every parameter is reduced: the models of these suites use all of them on all ranks."""
        return fqn in self.sums

    def reduce(self) -> None:
        wanted = [fqn for fqn in self.full if self.used_anywhere(fqn)]
        groups: dict[torch.dtype, list[str]] = {}
        for fqn in wanted:
            groups.setdefault(self.contribution(fqn).dtype, []).append(fqn)
        for fqns in groups.values():
            self.reduce_together(fqns)
        self.sums = {}

    def reduce_together(self, fqns: list[str]) -> None:
        """All gradients in one tensor, rank after rank, so that one collective reduces them."""
        parts = [self.contribution(fqn) for fqn in fqns]
        if self.setup.strategy == "no_shard":
            total = self.average(torch.cat(parts), None)
            for fqn, part in zip(fqns, total.split([part.numel() for part in parts])):
                self.store(fqn, part)
            return
        padded = [self.padded(part) for part in parts]
        flat = torch.cat([torch.cat([part[rank] for part in padded]) for rank in range(self.size)])
        mine = self.average(flat, torch.empty(flat.numel() // self.size, dtype=flat.dtype))
        for fqn, piece in zip(fqns, mine.split([part.shape[1] for part in padded])):
            self.store_piece(fqn, piece)

    def padded(self, part: torch.Tensor) -> torch.Tensor:
        chunk = -(-part.numel() // self.size)
        room = part.new_zeros(chunk * self.size)
        room[: part.numel()] = part
        return room.view(self.size, chunk)

    def store_piece(self, fqn: str, piece: torch.Tensor) -> None:
        shard = self.shards[fqn]
        held = piece[: shard.numel()].to(shard.dtype)
        shard.grad = held.clone() if shard.grad is None else shard.grad + held

    def average(self, flat: torch.Tensor, output: torch.Tensor | None) -> torch.Tensor:
        """The mean over the ranks, by the user's hook if there is one."""
        if self.hook is not None:
            self.call_hook(flat, output)
            return flat if output is None else output
        if output is None:
            dist.all_reduce(flat, group=self.setup.group)
            return flat / self.size
        _SCATTER(output, flat, group=self.setup.group)
        return output / self.size

    def call_hook(self, flat: torch.Tensor, output: torch.Tensor | None) -> None:
        assert self.hook is not None
        if output is None:
            self.hook(self.hook_state, flat)
        else:
            self.hook(self.hook_state, flat, output)

    # ---------------------------------------------------------------------------------------- state

    def saved(self) -> dict[str, torch.Tensor]:
        full = {fqn: self.gather(fqn).reshape(self.shapes[fqn]) for fqn in self.full}
        kept = {fqn.replace("_checkpoint_wrapped_module.", "") for fqn in self.inner.state_dict()}
        return full | {fqn: buffer.clone() for fqn, buffer in self.buffers_by_name().items() if fqn in kept}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        self.write_back({fqn: state[fqn] for fqn in self.full})
        for fqn, buffer in self.buffers_by_name().items():
            if fqn in state:
                buffer.copy_(state[fqn])

    def buffers_by_name(self) -> dict[str, torch.Tensor]:
        return {fqn.replace("_checkpoint_wrapped_module.", ""): buffer for fqn, buffer in self.inner.named_buffers()}

    def saved_shards(self) -> dict[str, torch.Tensor]:
        return {fqn: shard.detach().clone() for fqn, shard in self.shards.items()} | self.buffers_by_name()

    def load_shards(self, state: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for fqn, tensor in (*self.shards.items(), *self.buffers_by_name().items()):
                tensor.copy_(state[fqn])

    def saved_locally(self) -> dict[str, torch.Tensor]:
        return self.saved_shards()

    def load_locally(self, state: Mapping[str, torch.Tensor]) -> None:
        self.load_shards(state)

    def saved_optimizer(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        state = {
            fqn: {name: self.whole_state(fqn, value) for name, value in optimizer.state.get(shard, {}).items()}
            for fqn, shard in self.shards.items()
        }
        groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        return {"state": state, "param_groups": groups}

    def whole_state(self, fqn: str, value: Any) -> Any:
        shard = self.shards[fqn]
        if not isinstance(value, torch.Tensor) or value.shape != shard.shape or not shard.dim():
            return copy.copy(value)
        held = shard.detach().clone()
        with torch.no_grad():
            shard.copy_(value)
            whole = self.gather(fqn)
            shard.copy_(held)
        return whole.reshape(self.shapes[fqn] or (1,))  # not (): that is the shape of steps

    def load_optimizer(self, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
        for fqn, shard in self.shards.items():
            start, stop = self.span(self.full[fqn].numel())
            entries = {name: self.own_state(fqn, value, start, stop) for name, value in saved["state"][fqn].items()}
            optimizer.state.pop(shard, None)
            if entries:
                optimizer.state[shard] = entries
        self.load_groups(optimizer, saved["param_groups"])

    def own_state(self, fqn: str, value: Any, start: int, stop: int) -> Any:
        whole = isinstance(value, torch.Tensor) and value.shape == (self.shapes[fqn] or (1,))
        return value.reshape(-1)[start:stop].clone() if whole else copy.copy(value)

    def load_groups(self, optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
        for group, kept in zip(optimizer.param_groups, groups):
            group.update(copy.deepcopy(kept))

    # ---------------------------------------------------------------------------------------- around

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError("a toy cannot be copied")

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """`module.to`: the shards are what there is; the modules' own parameters are only views of what is gathered."""
        super()._apply(fn, recurse)
        for shard in self.shards.values():
            shard.data = fn(shard.data)
        return self


class MoreAdapter(ToyAdapter):
    """The adapter of a `MoreToy` class."""

    def __init__(self, toy: type[MoreToy], name: str = "more") -> None:
        super().__init__(toy, name)
        # What takes flags over the wire, or units of their own, is `Toy`'s.
        unused = {"unused_parameters", "unused_parameters_differ", "unused_gradient_is_none"}
        self.capabilities = (self.capabilities | MORE) - unused

    def full_state_dict(self, model: MoreToy) -> dict[str, torch.Tensor]:
        return model.saved()

    def load_full_state_dict(self, model: MoreToy, state: Mapping[str, torch.Tensor]) -> None:
        model.load(state)

    def sharded_state_dict(self, model: MoreToy) -> dict[str, torch.Tensor]:
        return model.saved_shards()

    def load_sharded_state_dict(self, model: MoreToy, state: Mapping[str, torch.Tensor]) -> None:
        model.load_shards(state)

    def local_state_dict(self, model: MoreToy) -> dict[str, torch.Tensor]:
        return model.saved_locally()

    def load_local_state_dict(self, model: MoreToy, state: Mapping[str, torch.Tensor]) -> None:
        model.load_locally(state)

    def full_optimizer_state(self, model: MoreToy, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return model.saved_optimizer(optimizer)

    def load_full_optimizer_state(
        self, model: MoreToy, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
    ) -> None:
        model.load_optimizer(optimizer, state)

    def register_comm_hook(self, model: MoreToy, state: object, hook: Callable[..., Any]) -> None:
        model.hook, model.hook_state = hook, state

    def named_buffers(self, model: MoreToy) -> list[tuple[str, torch.Tensor]]:
        return list(model.buffers_by_name().items())

    def units(self, model: MoreToy) -> list[tuple[str, tuple[str, ...]]]:
        return [("", tuple(model.full))]

    @contextmanager
    def trace_units(self, model: MoreToy, emit: Callable[[str, str, tuple[str, ...]], None]) -> Iterator[None]:
        model.emit = emit
        yield


UNBROKEN = MoreAdapter(MoreToy)
