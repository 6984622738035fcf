"""The smallest engine that owns backward, step and optimizer, and shows whole parameters alone.

The toy behind the methods of an engine: made with its optimizer, its step clears gradients, and it trains in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from fault import FAULTS, Fault
from torch import nn
from toy import Toy

from fsdp_testing.adapters.protocol import Setup


class Engine(nn.Module):
    """A model that trains by `engine.backward(loss)` and `engine.step()`."""

    def __init__(self, module: nn.Module, setup: Setup) -> None:
        super().__init__()
        self.toy = Toy(module.float(), setup)
        self.optimizer: torch.optim.Optimizer | None = None
        self.steps = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.toy(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        assert self.optimizer is not None
        self.steps += 1
        self.optimizer.step()
        self.clear(True)

    def clear(self, set_to_none: bool) -> None:
        self.toy.zero_grad(set_to_none)
        self.toy.clear_sums(set_to_none)


class EngineAdapter:
    """The adapter of an engine: no gradients, no pieces."""

    step_clears_gradients = True
    widest_dtype = "float32"
    capabilities = frozenset(
        {"full_shard", "no_shard", "no_sync", "accumulate_without_no_sync", "forward_only", "frozen_parameters",
         "uneven_parameters", "summon_writeback", "buffers"}
    )  # fmt: skip

    def __init__(self, engine: type[Engine], name: str) -> None:
        self.engine = engine
        self.name = name

    def wrap(self, module: nn.Module, setup: Setup) -> nn.Module:
        return self.engine(module, setup)

    def build_optimizer(self, model: Engine, make: Callable[..., torch.optim.Optimizer]) -> Any:
        model.optimizer = make(list(model.toy.shards.values()))
        return model.optimizer

    def backward(self, model: Engine, loss: torch.Tensor) -> None:
        model.backward(loss)

    def step(self, model: Engine, optimizer: Any) -> None:
        assert optimizer is model.optimizer
        model.step()

    def zero_grad(self, model: Engine, optimizer: Any, set_to_none: bool) -> None:
        model.clear(set_to_none)

    def no_sync(self, model: Engine) -> Any:
        return model.toy.no_sync() if model.toy.size > 1 else nullcontext()

    def full_parameters(self, model: Engine, *, writeback: bool) -> Any:
        return model.toy.full_parameters(writeback=writeback)

    def named_parameters(self, model: Engine) -> list[tuple[str, nn.Parameter]]:
        return list(model.toy.shards.items())

    def named_buffers(self, model: Engine) -> list[tuple[str, torch.Tensor]]:
        return list(model.toy.inner.named_buffers())


def broken(caught_by: str) -> Callable[[type[Engine]], EngineAdapter]:
    """Register a broken engine."""

    def register(engine: type[Engine]) -> EngineAdapter:
        made = EngineAdapter(engine, engine.__name__)
        FAULTS[f"{engine.__module__}:{engine.__name__}"] = Fault(made, (caught_by,), (engine.__doc__ or "").strip())
        return made

    return register


UNBROKEN = EngineAdapter(Engine, "engine")


@broken("training.sgd_momentum")
class BackwardHalves(Engine):
    """The engine divides the loss by accumulation steps that there are not."""

    def backward(self, loss: torch.Tensor) -> None:
        super().backward(loss / 2)


@broken("zero_grad.mixed_forms")
class SecondStepLost(Engine):
    """Every second step of the engine is skipped."""

    def step(self) -> None:
        if self.steps % 2:
            self.steps += 1
            self.clear(True)
            return
        super().step()


@broken("accumulation.no_sync_then_reduced")
class BackwardClears(Engine):
    """The engine's backward forgets what was accumulated by a micro-batch that was reduced."""

    def backward(self, loss: torch.Tensor) -> None:
        if self.toy.synchronize:
            self.toy.sums = {}
        super().backward(loss)
