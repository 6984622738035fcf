"""Equipment of the behaviour tests: models, inputs, the single-process reference, and the three ways to shard.

Everything runs in float64, where a mean over at most four ranks and a handful of layers is exact to about 1e-14; what
is compared after a few optimizer steps is therefore held to 1e-10, far below any error of meaning.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CLOSE = {"rtol": 1e-10, "atol": 1e-12}
PATHS = ("wrapper", "flat", "composable")
"""Wrapper with original parameters, wrapper with flat parameters, composable API."""


class Block(nn.Module):
    """Two layers and a buffer; adds its input, so that layers see gradients of different size."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.lin1 = nn.Linear(width, width + 1)
        self.lin2 = nn.Linear(width + 1, width)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.lin2(torch.tanh(self.lin1(x))) * self.scale


class Net(nn.Module):
    """Layers of its own before and after a few blocks: sizes that divide by no world size."""

    def __init__(self, width: int = 4, blocks: int = 3) -> None:
        super().__init__()
        self.inp = nn.Linear(3, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.out = nn.Linear(width, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Unit(nn.Module):
    """A unit in which another may be nested."""

    def __init__(self) -> None:
        super().__init__()
        self.l1 = nn.Linear(4, 4)
        self.seq = nn.Sequential(nn.ReLU(), nn.Linear(4, 4), nn.ReLU())
        self.l2 = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.l2(self.seq(self.l1(x)))


class Deep(nn.Module):
    """Units in units: l1, u1, u2 with sub-units, l2."""

    def __init__(self) -> None:
        super().__init__()
        self.l1 = nn.Linear(3, 4)
        self.u1, self.u2 = Unit(), Unit()
        self.u2.seq[1] = Unit()
        self.l2 = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.l2(self.u2(self.u1(self.l1(x))))


class Spy(nn.Module):
    """Notes the dtypes that its forward meets."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.lin = nn.Linear(width, width)
        self.register_buffer("offset", torch.zeros(width))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        self.met: dict[str, torch.dtype] = {}

    def forward(self, x: torch.Tensor, *, ids: torch.Tensor | None = None) -> torch.Tensor:
        self.met = {"param": self.lin.weight.dtype, "input": x.dtype, "buffer": self.offset.dtype}
        if ids is not None:
            self.met["ids"] = ids.dtype
        return self.lin(x) + self.offset.to(x.dtype)


class Chain(nn.Module):
    """Two of them, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Spy(), Spy()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Lin(nn.Module):
    """One unit with two layers, so that each rank of two holds most of one and little of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 4)
        self.b = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).tanh())


class Lab:
    """What a test does again and again, for one rank's ``world``."""

    Block = Block
    Net = Net
    Unit = Unit
    Deep = Deep
    Spy = Spy
    Chain = Chain
    Lin = Lin
    CLOSE = CLOSE

    def __init__(self, world: Any, collectives: Callable[[], Any]) -> None:
        self.world = world
        self._collectives = collectives

    def make(self, build: Callable[[], nn.Module] = Net, dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
        """Build a model with the same values on every rank."""
        torch.manual_seed(seed)
        return build().to(dtype)

    def batch(self, step: int = 0, rank: int | None = None, shape: tuple[int, ...] = (2, 3)) -> torch.Tensor:
        """Return the inputs of one rank in one step."""
        rank = self.world.rank if rank is None else rank
        generator = torch.Generator().manual_seed(1000 * step + rank)
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def batches(self, step: int = 0, **more: Any) -> list[torch.Tensor]:
        """Return the inputs of all ranks in one step."""
        return [self.batch(step, rank, **more) for rank in range(self.world.size)]

    def shard(self, model: nn.Module, path: str = "wrapper", *, policy: Any = None, **options: Any) -> Any:
        """Shard ``model`` one of three ways; ``policy`` may be a set of classes."""
        import fsdp_ref
        from fsdp_ref.composable import fully_shard
        from fsdp_ref.wrap import ModuleWrapPolicy

        if isinstance(policy, (set, frozenset)):
            policy = ModuleWrapPolicy(policy)
        if path == "composable":
            if "sharding_strategy" in options:
                options["strategy"] = options.pop("sharding_strategy")
            return fully_shard(model, policy=policy, **options)
        options.setdefault("use_orig_params", path == "wrapper")
        return fsdp_ref.FullyShardedDataParallel(model, auto_wrap_policy=policy, **options)

    def units(self, model: nn.Module) -> list[Any]:
        """Return the units of a sharded model, depth first."""
        from fsdp_ref.annotations import units_in

        return units_in(model)

    @contextmanager
    def full(self, model: nn.Module, **options: Any) -> Iterator[None]:
        """Show full parameters, whichever way the model was sharded."""
        import fsdp_ref

        with fsdp_ref.FullyShardedDataParallel.summon_full_params(model, **options):
            yield

    def params(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return copies of the full parameters by clean name."""
        from fsdp_ref.naming import clean_tensor_name

        with self.full(model, writeback=False):
            return {clean_tensor_name(name): p.detach().clone() for name, p in model.named_parameters()}

    def grads(self, model: nn.Module) -> dict[str, torch.Tensor | None]:
        """Return copies of the full gradients by clean name (original parameters only)."""
        from fsdp_ref.naming import clean_tensor_name

        with self.full(model, writeback=False, with_grads=True):
            return {
                clean_tensor_name(name): None if p.grad is None else p.grad.detach().clone()
                for name, p in model.named_parameters()
            }

    def reference_step(
        self,
        model: nn.Module,
        batches: list[Any],
        loss: Callable[..., torch.Tensor] | None = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> None:
        """Do in one process what all ranks do together: the mean of their losses."""
        total = sum((loss or self.loss)(model, batch) for batch in batches) / len(batches)
        total.backward()
        if optim is not None:
            optim.step()
            optim.zero_grad()

    @staticmethod
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        """A loss that is not linear in the outputs."""
        return model(batch).square().mean()

    def assert_same(self, got: dict[str, Any], want: dict[str, Any], **tolerance: float) -> None:
        """Compare tensors by name; None equals None only."""
        assert sorted(got) == sorted(want)
        for name, value in want.items():
            if value is None or got[name] is None:
                assert value is None and got[name] is None, f"{name}: {got[name]} against {value}"
            else:
                torch.testing.assert_close(got[name], value, **(tolerance or CLOSE), msg=lambda m, n=name: f"{n}: {m}")

    def assert_params(self, model: nn.Module, reference: nn.Module, **tolerance: float) -> None:
        """Compare the full parameters with those of the reference."""
        self.assert_same(self.params(model), {n: p.detach() for n, p in reference.named_parameters()}, **tolerance)

    def assert_grads(self, model: nn.Module, reference: nn.Module, **tolerance: float) -> None:
        """Compare the full gradients with those of the reference."""
        want = {n: None if p.grad is None else p.grad for n, p in reference.named_parameters()}
        self.assert_same(self.grads(model), want, **tolerance)

    def parity(
        self,
        build: Callable[[], nn.Module] = Net,
        path: str = "wrapper",
        *,
        steps: int = 3,
        loss: Callable[..., torch.Tensor] | None = None,
        optim: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
        prepare: Callable[[nn.Module], None] | None = None,
        **options: Any,
    ) -> Any:
        """Train sharded and in one process; parameters must agree after every step. Returns the sharded model."""
        reference = self.make(build)
        model = copy.deepcopy(reference)
        if prepare is not None:
            prepare(reference)
            prepare(model)
        model = self.shard(model, path, **options)
        model_optim = optim(model.parameters(), lr=0.05)
        reference_optim = optim(reference.parameters(), lr=0.05)
        for step in range(steps):
            (loss or self.loss)(model, self.batch(step)).backward()
            model_optim.step()
            model_optim.zero_grad()
            self.reference_step(reference, self.batches(step), loss, reference_optim)
            self.assert_params(model, reference)
        return model

    def events(self) -> Any:
        """Return a context that collects unit events."""
        return _events()

    def collectives(self) -> Any:
        """Return a context that lists every collective of the reference."""
        return self._collectives()


@contextmanager
def _events() -> Iterator[list[Any]]:
    from fsdp_ref.runtime.events import observe

    seen: list[Any] = []
    with observe(seen.append):
        yield seen


@pytest.fixture
def lab(world: Any, watch_collectives: Callable[[], Any]) -> Lab:
    """The equipment for this rank."""
    return Lab(world, watch_collectives)


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    """Each way to shard."""
    return str(request.param)


@pytest.fixture(params=["wrapper", "composable"])
def orig_path(request: pytest.FixtureRequest) -> str:
    """Each way to shard that keeps original parameters."""
    return str(request.param)
