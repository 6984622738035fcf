"""Checks that a model under an implementation on N ranks trains as in one process on the rows of all ranks.

A few steps of a loop that is the same for all models, run and compared as a user's own loop.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fsdp_testing.adapters.adapter import Adapter, TorchStyle
from fsdp_testing.adapters.protocol import Piece, Setup
from fsdp_testing.adapters.registry import adapter_of, load
from fsdp_testing.adapters.shared.claims import REPLICATED
from fsdp_testing.cases.records import Verdict
from fsdp_testing.errors import InvalidArgument
from fsdp_testing.ranks.pool import Pool, WorldOutcome, default_pool
from fsdp_testing.ranks.pool.targets import Target, resolve, target_of
from fsdp_testing.ranks.pool.world import World, current_world
from fsdp_testing.train.check import judged, run_alone
from fsdp_testing.train.deciding import check_something
from fsdp_testing.train.model_families import SPECIAL, VOCABULARY, make_tiny
from fsdp_testing.train.observation import Observer
from fsdp_testing.train.on_rank import Job, RunSettings
from fsdp_testing.train.quantities import Kind
from fsdp_testing.train.reading import Reader
from fsdp_testing.train.report import TrainingDiffers, TrainingUndecided
from fsdp_testing.train.running import Failed, Runner, Start, Undecided
from fsdp_testing.train.whole import WholeRun

ROWS, LENGTH = 2, 12
"""Rows of a rank in each step, and tokens of a row: as many for all, so that the mean of means is the mean of all."""
ACCELERATE = "accelerate"
_ACCELERATE = "fsdp_testing.train.model:ACCELERATED"
_ALONE = "single-process"
_IMPORTED = frozenset({"import path", "warnings filters"})
"""What the import of Transformers changes for good; the ranks that have imported it are lent again."""
_SLOW_TO_IMPORT = ("transformers", "transformers.modeling_utils", "torch._dynamo")


class ModelDiffers(TrainingDiffers):
    """A model trains differently under an implementation than in one process; the message names the first difference."""


class ModelUndecided(TrainingUndecided):
    """No verdict on a model under an implementation; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class ModelReport:
    """The agreeing comparison."""

    model: str
    implementation: str
    ranks: int
    steps: int
    tensors: int
    numbers: int

    def __str__(self) -> str:
        return (
            f"{self.model} under {self.implementation} on {self.ranks} ranks: {self.steps} steps match those of one "
            f"process (losses, {self.tensors} gradients and parameters, {self.numbers:,} numbers at each step)"
        )


@dataclass(frozen=True, slots=True)
class ModelJob(Job):
    """A training of a model as a rank runs it.

    Attributes:
        model: Family of Transformers, or the function that makes the model.
        implementation: Reference of an adapter.
        ranks: The ranks whose rows exist; a world of one takes all.
        steps: Optimizer steps.
        leaves_unused: Whether one process found parameters that get no gradient.
    """

    model: str | Target
    implementation: str
    ranks: int
    steps: int
    leaves_unused: bool = False

    def reader(self) -> Reader:
        adapter = adapter_of(self.implementation)

        def held_by(model: nn.Module, *, gradients: bool = True) -> dict[str, tuple[Piece, ...]]:
            return {name: tuple(pieces) for name, pieces in adapter.local_pieces(model).items()}

        return Reader(held_by)

    def train(self, run: RunSettings, observer: Observer) -> dict[str, Any]:
        """Train. Collectives: those of the implementation; all ranks of the world must join."""
        world, adapter = current_world(), adapter_of(self.implementation)
        torch.manual_seed(0)
        plain = make_tiny(self.model) if isinstance(self.model, str) else resolve(self.model)()
        model = adapter.wrap(plain.to(world.device).train(), _setup(self, adapter, plain, world))
        optimizer = torch.optim.SGD([p for _, p in adapter.named_parameters(model)], lr=0.1)
        generator = torch.Generator().manual_seed(1)
        for _ in range(self.steps):
            rows = torch.randint(SPECIAL, VOCABULARY, (self.ranks * ROWS, LENGTH), generator=generator)
            mine = rows.chunk(world.size)[world.rank].to(world.device)
            model(input_ids=mine, labels=mine).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return {}


def _setup(job: ModelJob, adapter: Adapter, model: nn.Module, world: World) -> Setup:
    sharded = "full_shard" in adapter.capabilities
    return Setup(
        rank=world.rank,
        world_size=world.size,
        device=world.device,
        group=world.group,
        mesh=world.mesh if sharded else None,
        units=_blocks(model) if "nested_wrapping" in adapter.capabilities else (),
        strategy="full_shard" if sharded else "no_shard",
        leaves_unused=job.leaves_unused,
    )


def _blocks(model: nn.Module) -> tuple[str, ...]:
    """Return the names of a model's blocks: members of lists of modules that lie in no other list."""
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    inside = [f"{name}.{place}" for name in outer for place, _ in model.get_submodule(name).named_children()]
    return tuple(name for name in inside if next(model.get_submodule(name).parameters(), None) is not None)


@dataclass(frozen=True, slots=True)
class Model(Start):
    """How a model is started: see `Start`."""

    model: str | Target
    implementation: str
    ranks: int
    timeout: float
    steps: int = 2
    leaves_unused: bool = False

    @property
    def name(self) -> str:
        return f"model {self.model}"

    @property
    def lasting(self) -> frozenset[str]:
        """What the import of Transformers changes for good; the ranks that have imported it are lent again."""
        return _IMPORTED

    @property
    def modules(self) -> tuple[str, ...]:
        return _SLOW_TO_IMPORT if isinstance(self.model, str) else ()

    def job(self, size: int) -> ModelJob:
        """Return what a rank runs; one process trains the model as it is."""
        if size == 1:
            return ModelJob(self.model, _ALONE, self.ranks, self.steps)
        return ModelJob(self.model, self.implementation, self.ranks, self.steps, self.leaves_unused)

    def ending(self, outcome: WorldOutcome) -> Exception:
        error = next((rank.error for rank in outcome.ranks if rank.error is not None), None)
        if error is not None and error.type_name == "InvalidArgument":
            return InvalidArgument(error.message)
        if outcome.size == 1:
            return Undecided(f"does not train in one process, so nothing can be compared: {outcome.describe()}")
        return Failed(f"does not train as it does in one process: {outcome.describe()}")


def check_model(
    model: str | Callable[[], nn.Module],
    implementation: str = "torch-ddp",
    *,
    world_size: int = 2,
    steps: int = 2,
    timeout: float = 120.0,
    pool: Pool | None = None,
) -> ModelReport:
    """Train a tiny model under an implementation on some ranks, and in one process on the rows of all of them.

    Args:
        model: Family of causal language models of Transformers (its `model_type`), or an importable function. That makes a
            model of at least 64 tokens, which is called with `input_ids` and `labels` and returns an object with `loss`.
        implementation: "accelerate", or the name or import string of an implementation.
        world_size: Number of ranks.
        steps: Optimizer steps.
        timeout: Seconds until a rank counts as hung.
        pool: The pool that lends worlds; the process's own by default.

    Raises:
        ModelDiffers: It trains differently, or not at all, on the ranks.
        ModelUndecided: It does not train, or does not repeat itself, in one process, roundings alone decide most of
            a quantity, or it hung once and not again.
        InvalidArgument: Transformers, Accelerate, the family or the implementation is missing, or fewer than two ranks.
    """
    if world_size < 2:
        raise InvalidArgument(f"world_size: expected at least 2 ranks, got {world_size}. One process is always run.")
    (target,), (reference,) = check_names((model,), (implementation,))
    name = f"{target} under {implementation} on {world_size} ranks"
    pool, start = pool or default_pool(), Model(target, _ALONE, world_size, timeout, steps)
    try:
        alone = _alone(start, pool)
    except (Failed, Undecided) as why:
        raise ModelUndecided(f"{target} {why}") from why
    unused = any(seen.given < len(seen.of(Kind.GRADIENT)) for seen in alone.ranks[0].steps)
    start, runs = replace(start, implementation=reference, leaves_unused=unused), {1: alone}
    judgement = judged(Runner(start, pool), runs, world_size)
    if judgement.verdict is Verdict.FAIL:
        raise ModelDiffers(f"{name}: {judgement.sentence}")
    if judgement.verdict is not Verdict.PASS:
        raise ModelUndecided(f"{name}: {judgement.sentence}")
    run = runs[world_size]
    numbers = [run.quantities[key][0].numel() for key in run.names(Kind.GRADIENT, Kind.PARAMETER)]
    return ModelReport(str(target), implementation, world_size, steps, len(numbers), sum(numbers))


@functools.lru_cache(maxsize=4)
def _alone(start: Model, pool: Pool) -> WholeRun:
    """Return the run in one process; the implementations of one model share it."""
    runner = Runner(start, pool)
    alone, _ = run_alone(runner, 1)
    if runner.unsteady:
        raise Undecided(" ".join(runner.unsteady))
    check_something(alone)
    return alone


def check_names(
    models: Sequence[str | Callable[[], nn.Module]], implementations: Sequence[str]
) -> tuple[list[str | Target], list[str]]:
    """Return how ranks find models and implementations; imports neither Transformers nor Accelerate.

    Raises:
        InvalidArgument: A package that is needed is not installed, a function is not importable, or there is no such
            implementation.
    """
    named = [model for model in models if isinstance(model, str)]
    if named and importlib.util.find_spec("transformers") is None:
        raise InvalidArgument(
            f"models {named[0]!r}{', ...' if len(named) > 1 else ''}: expected Transformers to be installed, and it is not. "
            "Install it (pip install transformers), or give importable functions that make models."
        )
    if ACCELERATE in implementations and importlib.util.find_spec("accelerate") is None:
        raise InvalidArgument(
            "implementation 'accelerate': expected Accelerate to be installed, and it is not. Install it (pip install "
            'accelerate), or leave it out: implementations=("torch-ddp", "torch-fsdp2", "fsdp_ref-wrapper").'
        )
    targets = [model if isinstance(model, str) else target_of(model) for model in models]
    return targets, [load(_ACCELERATE if name == ACCELERATE else name).reference for name in implementations]


def _wrap_by_accelerate(module: nn.Module, setup: Setup) -> nn.Module:
    """Prepare the module as users of Accelerate do, which makes it DDP on CPUs. Collectives: those of DDP's construction."""
    accelerate: Any = importlib.import_module("accelerate")
    states: Any = importlib.import_module("accelerate.state")
    for state in (states.AcceleratorState, states.GradientState, states.PartialState):
        state._reset_state()  # they are kept for the life of a process, and a rank outlives its model
    unused = accelerate.DistributedDataParallelKwargs(find_unused_parameters=setup.leaves_unused)
    return accelerate.Accelerator(cpu=setup.device.type == "cpu", kwargs_handlers=[unused]).prepare(module)


ACCELERATED = TorchStyle(name="accelerate", wrap=_wrap_by_accelerate, capabilities=REPLICATED)
