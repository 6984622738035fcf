"""What the programs of checks consist of: micro-batches, forwards without backward, iterations, as short calls."""

from __future__ import annotations

from typing import Any

from fsdp_testing.cases.records import Batch, Forward, ForwardBackward, Operation, Step, ZeroGrad


def micro_batch(seed: int, **batch: Any) -> ForwardBackward:
    """Return a micro-batch whose gradients are reduced."""
    return ForwardBackward(Batch(seed, **batch))


def no_sync_batch(seed: int, **batch: Any) -> ForwardBackward:
    """Return a micro-batch inside `no_sync`."""
    return ForwardBackward(Batch(seed, **batch), no_sync=True)


def micro_batches(*seeds: int) -> tuple[Operation, ...]:
    """Return micro-batches whose gradients are reduced, each by itself."""
    return tuple(micro_batch(seed) for seed in seeds)


def accumulated(*seeds: int) -> tuple[Operation, ...]:
    """Return micro-batches inside `no_sync`, and a last one that reduces the sum."""
    return (*(no_sync_batch(seed) for seed in seeds[:-1]), micro_batch(seeds[-1]))


def forward(seed: int, mode: str = "eval", **batch: Any) -> Forward:
    """Return a forward that no backward follows."""
    return Forward(Batch(seed, **batch), mode)


def iteration(seed: int, *before_step: Operation, **batch: Any) -> tuple[Operation, ...]:
    """Return one training iteration: micro-batch, whatever comes before the step, step, gradients cleared."""
    return micro_batch(seed, **batch), *before_step, Step(), ZeroGrad()


def iterations(count: int, first: int = 0, **batch: Any) -> tuple[Operation, ...]:
    """Return several training iterations on different inputs."""
    return tuple(op for seed in range(first, first + count) for op in iteration(seed, **batch))
