"""One sharded model on devices beside the same model in one process on the same device."""

from __future__ import annotations

import copy
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import ShardingStrategy, fully_shard
from fsdp_ref.composable import clip_grad_norm_, no_sync
from fsdp_ref.naming import clean_tensor_name
from fsdp_ref.wrap import ModuleWrapPolicy

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Iterable

# A mean over at most three ranks and six layers in float64 is exact to about 1e-14; optimizer steps amplify it little.
CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def occupy(device: torch.device, rounds: int = 6) -> None:
    """Keep the current stream busy for some milliseconds: whoever forgets to wait for it reads old values.

    A simulated device is late by itself, and its products are the host's: large ones took a minute for each test.
    """
    size = 2048 if device.type == "cuda" else 16
    work = torch.ones(size, size, device=device)
    for _ in range(rounds):
        work = work @ work


class Block(nn.Module):
    """The unit of these models; a slow one keeps the device busy before it computes."""

    def __init__(self, width: int, *, slow: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.slow = slow

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.slow:
            occupy(x.device)
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """A root with parameters of its own around blocks."""

    def __init__(self, width: int = 6, blocks: int = 3, *, slow: bool = False) -> None:
        super().__init__()
        self.inp = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width, slow=slow) for _ in range(blocks))
        self.out = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Pair:
    """A model in one process (``plain``) and sharded (``model``), trained on the same data."""

    Net = Net
    Block = Block
    CLOSE = CLOSE

    def __init__(self, world: Any, api: str, strategy: str, make: Callable[[], nn.Module], options: Any) -> None:
        self.world = world
        self.api = api
        self.device = world.device
        self.device_module = torch.get_device_module(world.device)
        torch.manual_seed(0)
        made = make().double()
        self.plain = copy.deepcopy(made).to(self.device)
        on_cpu = options.pop("build_on_cpu", False)
        self.model = self._shard(made if on_cpu else made.to(self.device), strategy, options)
        self.plain_optimizer = torch.optim.Adam(self.plain.parameters(), lr=0.05)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)

    def _shard(self, module: nn.Module, strategy: str, options: dict[str, Any]) -> nn.Module:
        policy = ModuleWrapPolicy({Block})
        chosen = ShardingStrategy[strategy]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one rank, and NO_SHARD, are warned about
            if self.api == "composable":
                return fully_shard(module, policy=policy, strategy=chosen, **options)
            orig = self.api == "orig"
            return FSDP(module, auto_wrap_policy=policy, sharding_strategy=chosen, use_orig_params=orig, **options)

    def inputs(self, seed: int) -> torch.Tensor:
        """All ranks' inputs: [rank, row, column]."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(self.world.size, 5, 6, generator=generator, dtype=torch.float64).to(self.device)

    def backward(self, seed: int) -> None:
        xs = self.inputs(seed)
        (sum(self.plain(x).square().mean() for x in xs) / self.world.size).backward()
        self.model(xs[self.world.rank]).square().mean().backward()

    def step(self) -> None:
        for optimizer in (self.plain_optimizer, self.optimizer):
            optimizer.step()
            optimizer.zero_grad()

    def train(self, steps: int = 3) -> None:
        for seed in range(steps):
            self.backward(seed)
            self.step()
            self.compare()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return no_sync(self.model)

    def clip(self, max_norm: float) -> torch.Tensor:
        return clip_grad_norm_(self.model, max_norm)

    def full(self, **options: Any) -> contextlib.AbstractContextManager[None]:
        return FSDP.summon_full_params(self.model, **options)

    def params(self) -> dict[str, torch.Tensor]:
        """Copies of the full parameters by clean name."""
        with self.full(writeback=False):
            return {clean_tensor_name(n): p.detach().clone() for n, p in self.model.named_parameters()}

    def compare(self, **tolerance: float) -> None:
        want = ((name, param.detach()) for name, param in self.plain.named_parameters())
        self.same(self.params(), want, **tolerance)

    def same(self, have: dict[str, torch.Tensor], want: Iterable[tuple[str, torch.Tensor]], **tolerance: float) -> None:
        expected = dict(want)
        assert set(have) == set(expected)
        for name, value in expected.items():
            torch.testing.assert_close(have[name], value, **(tolerance or CLOSE), msg=lambda m, n=name: f"{n}: {m}")

    def units(self) -> list[Any]:
        from fsdp_ref.annotations import units_in

        return units_in(self.model)


@pytest.fixture
def pair(world: Any) -> Callable[..., Pair]:
    """Make a :class:`Pair` on this rank's device."""

    def make(
        api: str = "orig", strategy: str = "FULL_SHARD", model: Callable[[], nn.Module] = Net, **options: Any
    ) -> Pair:
        assert world.device.type != "cpu"
        return Pair(world, api, strategy, model, options)

    return make


@pytest.fixture(params=["flat", "orig", "composable"])
def api(request: pytest.FixtureRequest) -> str:
    """Each way to make units: one flat parameter, original parameters, composable."""
    return str(request.param)


@pytest.fixture(params=["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def strategy(request: pytest.FixtureRequest) -> str:
    """Each strategy over one group."""
    return str(request.param)
