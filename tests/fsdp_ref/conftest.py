"""Fixtures of the training tests: both APIs on one side, one process with all ranks' data on the other.

Tests over three axes or more (strategy, API, schedule, number of ranks, ...) run with every pair of values in `tox -e cpu`;
the rest of their product is `slow`, and runs nightly.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import ShardingStrategy, fully_shard
from fsdp_ref.annotations import units_under
from fsdp_ref.comm.collectives import Collectives
from fsdp_ref.composable import no_sync
from fsdp_ref.wrap import ModuleWrapPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

APIS = ["flat", "orig", "composable"]
STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]


@pytest.hookimpl(tryfirst=True)  # before `-m` deselects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    products: defaultdict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and _FOLDER in item.path.parents:
            products[item.nodeid.partition("[")[0]].append(item)
    for product in products.values():
        rows = [_values(item) for item in product]
        if len(rows[0]) >= _AXES:
            chosen = _covering(rows)
            for number, item in enumerate(product):
                if number not in chosen:
                    item.add_marker(pytest.mark.slow)


_FOLDER = Path(__file__).parent
_AXES = 3


def _values(item: pytest.Function) -> tuple[Any, ...]:
    """Return the value on each axis, by identity: each item has those of the lists that the product is made from."""
    params = dict(item.callspec.params)
    # What one `parametrize` gives several names is one axis.
    tables = [mark.args[0] for mark in item.iter_markers("parametrize")]
    rows = [[name.strip() for name in (table.split(",") if isinstance(table, str) else table)] for table in tables]
    together = [tuple(id(params.pop(name)) for name in row if name in params) for row in rows]
    return (*together, *map(id, params.values()))


def _covering(rows: Sequence[tuple[Any, ...]]) -> set[int]:
    """Return the numbers of some rows in which every pair of values occurs that occurs in a row."""
    pairs = [set(itertools.combinations(enumerate(row), 2)) for row in rows]
    due, chosen = set().union(*pairs), set()
    while due:
        best = max(range(len(rows)), key=lambda number: len(pairs[number] & due))
        chosen.add(best)
        due -= pairs[best]
    return chosen


@pytest.fixture
def covering() -> Callable[[Sequence[tuple[Any, ...]]], set[int]]:
    """Return the function that chooses from a product."""
    return _covering


class Block(nn.Module):
    """The unit of these models."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """A root with parameters of its own around blocks."""

    def __init__(self, width: int = 6, blocks: int = 3) -> None:
        super().__init__()
        self.inp = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.out = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Trial:
    """One sharded model beside the same model in one process."""

    Block = Block
    Net = Net

    def __init__(
        self, world: Any, api: str, strategy: str, make: Callable[[], nn.Module] = Net, **options: Any
    ) -> None:
        self.world = world
        torch.manual_seed(0)
        self.plain = make().double()
        self.api = api
        self.model = self.shard(copy.deepcopy(self.plain), strategy, **options)
        self.options = {"lr": 0.1, "momentum": 0.9}
        self.plain_optimizer = torch.optim.SGD(self.plain.parameters(), **self.options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), **self.options)

    def shard(self, module: nn.Module, strategy: str, **options: Any) -> nn.Module:
        policy = options.pop("policy", ModuleWrapPolicy({Block}))
        chosen = ShardingStrategy[strategy]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if self.api == "composable":
                return fully_shard(module, policy=policy, strategy=chosen, **options)
            return FSDP(
                module,
                auto_wrap_policy=policy,
                sharding_strategy=chosen,
                use_orig_params=self.api == "orig",
                **options,
            )

    def inputs(self, seed: int, rows: int = 5) -> torch.Tensor:
        """All ranks' inputs: [rank, row, column]."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(self.world.size, rows, 6, generator=generator, dtype=torch.float64)

    def plain_loss(self, xs: torch.Tensor, loss: Callable[[Any], torch.Tensor] | None = None) -> torch.Tensor:
        read = loss or (lambda out: out.pow(2).mean())
        return sum(read(self.plain(x)) for x in xs) / self.world.size

    def loss(self, xs: torch.Tensor, loss: Callable[[Any], torch.Tensor] | None = None) -> torch.Tensor:
        read = loss or (lambda out: out.pow(2).mean())
        return read(self.model(xs[self.world.rank]))

    def both_backward(self, seed: int, loss: Callable[[Any], torch.Tensor] | None = None) -> None:
        xs = self.inputs(seed)
        self.plain_loss(xs, loss).backward()
        self.loss(xs, loss).backward()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.plain_optimizer.zero_grad(set_to_none)
        self.optimizer.zero_grad(set_to_none)

    def step(self) -> None:
        self.plain_optimizer.step()
        self.optimizer.step()

    def train(self, steps: int = 3, seed: int = 0, loss: Callable[[Any], torch.Tensor] | None = None) -> None:
        for step in range(steps):
            self.zero_grad(set_to_none=step % 2 == 0)
            self.both_backward(seed + step, loss)
            self.step()
            self.compare()

    def no_sync(self, wanted: bool = True) -> contextlib.AbstractContextManager[None]:
        return no_sync(self.model) if wanted else contextlib.nullcontext()

    def compare(self, tolerance: float = 1e-12) -> None:
        """Compare all parameters, by name; also checks that something was compared."""
        want = dict(self.plain.named_parameters())
        with FSDP.summon_full_params(self.model, writeback=False):
            have = {name: param.detach().clone() for name, param in self.model.named_parameters()}
        assert set(have) == set(want)
        for name, param in want.items():
            torch.testing.assert_close(have[name], param.detach(), rtol=tolerance, atol=tolerance, msg=name)

    def inner(self) -> nn.Module:
        return self.model.module if isinstance(self.model, FSDP) else self.model

    def blocks(self) -> list[nn.Module]:
        return [module for module in self.model.modules() if isinstance(module, Block)]


@pytest.fixture
def trial(world: Any) -> Callable[..., Trial]:
    """Make a :class:`Trial` in this rank's world."""

    def make(api: str, strategy: str, model: Callable[[], nn.Module] = Net, **options: Any) -> Trial:
        return Trial(world, api, strategy, model, **options)

    return make


@pytest.fixture(params=APIS)
def api(request: pytest.FixtureRequest) -> str:
    """Each way to make units: one flat parameter, original parameters, composable."""
    return str(request.param)


@pytest.fixture(params=STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> str:
    """Each strategy over one group."""
    return str(request.param)


@dataclass(frozen=True)
class Call:
    """One collective that the reference asked for, before it starts."""

    op: str
    tensor: torch.Tensor
    group: dist.ProcessGroup
    unit: str
    stream: int


def _stream_of(tensor: torch.Tensor) -> int:
    if tensor.device.type == "cpu":
        return 0
    return int(torch.get_device_module(tensor.device).current_stream().stream_id)


@contextlib.contextmanager
def _watched_collectives() -> Iterator[list[Call]]:
    seen: list[Call] = []

    def watching(op: str) -> Callable[..., Any]:
        sent = {"all_gather": (1, 2, 3), "reduce_scatter": (1, 2, 3), "all_reduce": (0, 1, 2), "broadcast": (0, 2, 3)}[
            op
        ]
        original = vars(Collectives)[op]

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            tensor, *rest = (args[place] for place in sent)
            seen.append(Call(op, tensor, *rest, _stream_of(tensor)))
            return original(self, *args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for op in ("all_gather", "reduce_scatter", "all_reduce", "broadcast"):
            stack.enter_context(mock.patch.object(Collectives, op, watching(op)))
        yield seen


@pytest.fixture
def watch_collectives() -> Callable[[], contextlib.AbstractContextManager[list[Call]]]:
    """Return a context whose value lists the reference's collectives of this rank while it lasts."""
    return _watched_collectives


@pytest.fixture
def mesh_of() -> Callable[..., contextlib.AbstractContextManager[Any]]:
    """Return a context: a (replicate, shard) mesh of a shape, whose groups are gone afterwards; all ranks enter."""

    @contextlib.contextmanager
    def made(*shape: int) -> Iterator[Any]:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        try:
            yield mesh
        finally:
            for group in {mesh.get_group(0), mesh.get_group(1)} - {dist.group.WORLD}:
                dist.destroy_process_group(group)

    return made


def full_bytes(model: nn.Module) -> int:
    """Return the bytes of full parameters that units of ``model`` have now."""
    handles = [unit.handle for _, _, unit in units_under(model)]
    buffers = [buffer for handle in handles for buffer in handle._buffers.values()]
    return sum(buffer.tensor.untyped_storage().size() for buffer in buffers)


@pytest.fixture(name="full_bytes")
def _full_bytes() -> Callable[[nn.Module], int]:
    """Return a function: bytes of full parameters that the units of a model have now."""
    return full_bytes
