"""Equipment of the tests of saved state: a model with unlike parameters, ways to shard it, and one process beside them."""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import OptimStateKeyType, ShardingStrategy, fully_shard
from fsdp_ref.wrap import ModuleWrapPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class Block(nn.Module):
    """Two layers and a scalar: sizes that divide by no number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 7)
        self.b = nn.Linear(7, 5, bias=False)
        self.gain = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(torch.tanh(self.a(x))) * self.gain


def net() -> nn.Module:
    """Blocks between layers of the root; one bias has a single element."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 5), Block(), Block(), nn.Linear(5, 1)).double()


def adamw(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, **{"lr": 0.05, **options})


class OptimLab:
    """What the tests of optimizer state do on a rank."""

    Block = Block
    net = staticmethod(net)
    adamw = staticmethod(adamw)

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def shard(self, layout: str, module: nn.Module, **options: Any) -> nn.Module:
        """Shard as ``"<api> <strategy> <wrapped or whole>"`` says."""
        api, strategy, wrapped = layout.split()
        policy = ModuleWrapPolicy({Block}) if wrapped == "wrapped" else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if api == "composable":
                return fully_shard(module, policy=policy, strategy=ShardingStrategy[strategy], **options)
            return FSDP(
                module,
                auto_wrap_policy=policy,
                sharding_strategy=ShardingStrategy[strategy],
                use_orig_params=api == "orig",
                **options,
            )

    def trained(
        self, layout: str, steps: int = 2, make: Callable[..., Any] = adamw, **options: Any
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return a sharded model and its optimizer after some steps."""
        model = self.shard(layout, net(), **options)
        optim = make(model.parameters())
        for step in range(steps):
            self.step(model, optim, step)
        return model, optim

    def inputs(self, seed: int) -> torch.Tensor:
        """All ranks' inputs."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(self.size, 4, 5, generator=generator, dtype=torch.float64)

    def step(self, model: nn.Module, optim: torch.optim.Optimizer, seed: int) -> None:
        """Train a step on this rank's inputs."""
        optim.zero_grad()
        dtype = next(model.parameters()).dtype
        model(self.inputs(seed)[self.rank].to(dtype)).pow(2).mean().backward()
        optim.step()

    def plain_step(self, model: nn.Module, optim: torch.optim.Optimizer, seed: int) -> None:
        """Train a step on all ranks' inputs."""
        optim.zero_grad()
        (sum(model(x).pow(2).mean() for x in self.inputs(seed)) / self.size).backward()
        optim.step()

    def plain(self, steps: int = 2, make: Callable[..., Any] = adamw) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return what one process has after these steps."""
        model = net()
        optim = make(model.parameters())
        for step in range(steps):
            self.plain_step(model, optim, step)
        return model, optim

    def named(self, model: nn.Module, optim: torch.optim.Optimizer) -> Mapping[str, Any]:
        """Return a plain optimizer's state by name, copied."""
        return FSDP.rekey_optim_state_dict(
            copy.deepcopy(optim.state_dict()), OptimStateKeyType.PARAM_NAME, model, optim=optim
        )

    def same(self, one: Any, other: Any, bound: float = 0.0, path: str = "state") -> None:
        """Compare to the bit, or within an absolute bound; keys, shapes and dtypes must agree."""
        assert isinstance(other, type(one)) or isinstance(one, type(other)), path
        if isinstance(one, dict):
            assert set(one) == set(other), f"{path}: {list(one)}, {list(other)}"
            for key in one:
                self.same(one[key], other[key], bound, f"{path}.{key}")
        elif isinstance(one, list | tuple):
            assert len(one) == len(other), path
            for place, pair in enumerate(zip(one, other, strict=True)):
                self.same(*pair, bound, f"{path}[{place}]")
        elif isinstance(one, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=0, atol=bound, msg=lambda text: f"{path}: {text}")
        else:
            assert one == other, f"{path}: {one}, {other}"


@pytest.fixture
def optim_lab(world: Any) -> OptimLab:
    return OptimLab(world.rank, world.size)
