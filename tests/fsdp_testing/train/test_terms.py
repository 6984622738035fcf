"""What backward adds to gradients is seen under engines that shard parameters: mistakes that all sizes make alike fail."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import fsdp_ref
from fsdp_ref import composable
from fsdp_testing import check_training
from fsdp_testing.train.function import TrainingDiffers

ROWS, STEPS, PARTS = 12, 3, 3


def fsdp1(module, world, **options):
    mesh = dist.device_mesh.init_device_mesh("cpu", (world.size,))
    return FullyShardedDataParallel(module, device_mesh=mesh, device_id=torch.device("cpu"), **options)


ENGINES = {
    "fsdp1": lambda module, world: fsdp1(module, world, use_orig_params=True),
    "fsdp1 flat": lambda module, world: fsdp1(module, world, use_orig_params=False),
    "fsdp2": lambda module, world: fully_shard(module, mesh=world.mesh),
    "fsdp_ref": lambda module, world: fsdp_ref.FullyShardedDataParallel(module, process_group=world.group),
    "fsdp_ref composable": lambda module, world: composable.fully_shard(module, mesh=world.mesh),
}


def shards(world, engine, *, clear=(0,), share=None, before_step=lambda optimizer: None, unscales=None):
    """Train with an engine that shards; with `share`, gradients are taken away after each micro-batch and added up by hand."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    plain[0] = ENGINES[engine](plain[0], world)
    model = ENGINES[engine](plain, world)
    parameters = [*model.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=0.1) if unscales is not None else torch.optim.SGD(parameters, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=unscales is not None)
    for step in range(STEPS):
        sums = [0.0 for _ in parameters]
        for part in range(PARTS):
            if part in clear:
                optimizer.zero_grad()
            draw = torch.Generator().manual_seed(10 * step + part)
            inputs = torch.randn(ROWS, 3, generator=draw).double()[world.rank :: world.size]
            scaler.scale((model(inputs) - 1).square().mean() / PARTS).backward()
            if share is not None:
                sums = [total if p.grad is None else total + p.grad * share(part) for total, p in zip(sums, parameters)]
                optimizer.zero_grad()
        for total, parameter in zip(sums, parameters):
            if isinstance(total, torch.Tensor):
                parameter.grad = total
        before_step(optimizer)
        scaler.step(optimizer) if unscales else optimizer.step()
        if unscales:
            scaler.update()
    return {}


def empties(optimizer):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None if parameter.grad is None else torch.zeros_like(parameter.grad)


SHARDED_MISTAKES = {
    "clears before each micro-batch": (
        {"clear": range(PARTS)},
        r"lacks backward pass 1 and backward pass 2, at step 0",
    ),
    "never clears": ({"clear": ()}, "still contains the gradient of the step before"),
    "clears before the step": ({"before_step": empties}, "lacks every backward pass|no gradient other than zero"),
    "drops the last": ({"share": lambda part: float(part < PARTS - 1)}, "lacks backward pass 3"),
    "counts the first twice": ({"share": lambda part: 2.0 if part == 0 else 1.0}, "counts backward pass 1 twice"),
    "divides all but the last": (
        {"share": lambda part: 1.0 if part == PARTS - 1 else 1.0 / PARTS},
        "counts backward pass 1 and backward pass 2 1/3 times",
    ),
    "forgets to unscale": ({"unscales": False}, r"1024 times .*not unscaled"),
}
SHARDED_LOOPS = {"unscales": {"unscales": True}, "takes gradients away": {"share": lambda part: 1.0}}


def _named(engine, what, options):
    """Return a loop that ranks find by its name."""

    def loop(world):
        return shards(world, engine, **options)

    loop.__name__ = loop.__qualname__ = f"{engine} {what}"
    globals()[loop.__name__] = loop
    return loop


LOOPS = {
    (engine, what): _named(engine, what, options)
    for engine in ENGINES
    for what, options in {**{k: v[0] for k, v in SHARDED_MISTAKES.items()}, **SHARDED_LOOPS}.items()
}


@pytest.mark.parametrize(
    ("engine", "mistake"),
    [
        (engine, mistake)
        for engine in ENGINES
        for mistake in SHARDED_MISTAKES
        if engine in ("fsdp1", "fsdp_ref") or mistake in ("never clears", "counts the first twice")
    ],
)
def test_a_mistake_under_an_engine_that_shards_fails(engine, mistake):
    with pytest.raises(TrainingDiffers, match=SHARDED_MISTAKES[mistake][1]):
        check_training(LOOPS[engine, mistake], world_sizes=(2,))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("what", SHARDED_LOOPS)
def test_a_right_loop_under_an_engine_that_shards_passes(engine, what):
    check_training(LOOPS[engine, what], world_sizes=(2,))
