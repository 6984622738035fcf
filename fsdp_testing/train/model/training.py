"""What does a rank train, and what is seen of it? A few steps of a model on its share of the rows of all ranks."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.adapters.protocol import Setup
from fsdp_testing.adapters.registry import adapter_of
from fsdp_testing.oracle.fresh_memory import filled_with_garbage
from fsdp_testing.ranks.ledger.late_delivery import deliver_late
from fsdp_testing.ranks.pool.targets import Target, resolve
from fsdp_testing.ranks.pool.world import World, current_world
from fsdp_testing.train.function.disturbance import disturbed
from fsdp_testing.train.function.held import Spans, spans_of
from fsdp_testing.train.function.launch import as_torchrun_starts
from fsdp_testing.train.model.configurations import SPECIAL, VOCABULARY, make_tiny

ROWS, LENGTH = 2, 12
"""Rows of a rank in each step, and tokens of a row: as many for all, so that the mean of means is the mean of all."""


@dataclass(frozen=True, slots=True)
class ModelTraining:
    """What is trained.

    Attributes:
        model: Family of Transformers, or the function that makes the model.
        implementation: Reference of an adapter.
        ranks: Ranks whose rows there are; a world of one takes all.
        steps: Optimizer steps.
        leaves_unused: Whether one process found parameters that get no gradient.
        seed: Other than 0: roundings are made differently.
    """

    model: str | Target
    implementation: str
    ranks: int
    steps: int
    leaves_unused: bool = False
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ModelSteps:
    """What one rank saw, step by step.

    Attributes:
        start: Parameters before the first step.
        losses: Of its own rows.
        gradients: As the optimizer is given them.
        parameters: After the step.
        unused: Parameters without a gradient after the first backward.
        drew: Whether forward drew random numbers.
    """

    start: Spans
    losses: tuple[torch.Tensor, ...]
    gradients: tuple[Spans, ...]
    parameters: tuple[Spans, ...]
    unused: tuple[str, ...]
    drew: bool


def train_here(training: ModelTraining) -> ModelSteps:
    """Train in this rank. Collectives: those of the implementation; all ranks of the world must join."""
    world = current_world()
    roundings = disturbed(training.seed * world.size + world.rank) if training.seed else nullcontext()
    adapter = adapter_of(training.implementation)
    # Luck is to help nobody: neither a quick network nor memory full of zeros.
    with as_torchrun_starts(world), deliver_late(), filled_with_garbage(), roundings:
        torch.manual_seed(0)
        plain = make_tiny(training.model) if isinstance(training.model, str) else resolve(training.model)()
        model = adapter.wrap(plain.to(world.device).train(), _setup(training, adapter, plain, world))
        return _train(training, adapter, model, world)


def _setup(training: ModelTraining, adapter: Adapter, model: nn.Module, world: World) -> Setup:
    sharded = "full_shard" in adapter.capabilities
    return Setup(
        rank=world.rank,
        world_size=world.size,
        device=world.device,
        group=world.group,
        mesh=world.mesh if sharded else None,
        units=_blocks(model) if "nested_wrapping" in adapter.capabilities else (),
        strategy="full_shard" if sharded else "no_shard",
        leaves_unused=training.leaves_unused,
    )


def _blocks(model: nn.Module) -> tuple[str, ...]:
    """Return the names of a model's blocks: members of lists of modules that lie in no other list."""
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    inside = [f"{name}.{place}" for name in outer for place, _ in model.get_submodule(name).named_children()]
    return tuple(name for name in inside if next(model.get_submodule(name).parameters(), None) is not None)


def _train(training: ModelTraining, adapter: Adapter, model: nn.Module, world: World) -> ModelSteps:
    optimizer = torch.optim.SGD([p for _, p in adapter.named_parameters(model)], lr=0.1)
    generator = torch.Generator().manual_seed(1)
    start = {name: spans_of(found, "value") for name, found in adapter.local_pieces(model).items()}
    losses, gradients, parameters = [], [], []
    unused: tuple[str, ...] = ()
    drew = False
    for step in range(training.steps):
        rows = torch.randint(SPECIAL, VOCABULARY, (training.ranks * ROWS, LENGTH), generator=generator)
        mine = rows.chunk(world.size)[world.rank].to(world.device)
        state = torch.get_rng_state()
        loss = model(input_ids=mine, labels=mine).loss
        drew |= not torch.equal(state, torch.get_rng_state())
        loss.backward()
        held = adapter.local_pieces(model)
        if not step:
            unused = tuple(name for name, found in held.items() if all(piece.grad is None for piece in found))
        gradients.append({name: spans_of(found, "grad") for name, found in held.items()})
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu().clone())
        parameters.append({name: spans_of(found, "value") for name, found in adapter.local_pieces(model).items()})
    return ModelSteps(start, tuple(losses), tuple(gradients), tuple(parameters), unused, drew)
