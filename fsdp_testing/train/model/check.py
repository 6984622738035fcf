"""Does a model train under an implementation on N ranks as it does in one process on the rows of all ranks?

Compared at each step: the loss (mean over ranks), each gradient that the optimizer is given, each parameter after the step.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fsdp_testing.adapters.registry import load
from fsdp_testing.errors import HarnessError, InvalidArgument
from fsdp_testing.ranks.pool import Fate, Pool, WorldOutcome, default_pool
from fsdp_testing.ranks.pool.targets import Target, target_of
from fsdp_testing.train.function.comparison import (
    ROUNDINGS,
    Decided,
    Quantities,
    beyond_roundings,
    first_difference,
    suggestion,
)
from fsdp_testing.train.function.spans import assembled
from fsdp_testing.train.function.whole import GRADIENT, PARAMETER, nothing_trained, vanishing
from fsdp_testing.train.model.training import ModelSteps, ModelTraining, train_here

ACCELERATE = "accelerate"
_ACCELERATE = "fsdp_testing.train.model.with_accelerate:IMPLEMENTATION"
_ALONE = "single-process"
_IMPORTED = frozenset({"import path", "warnings filters"})
"""What the import of Transformers changes for good; the ranks that have imported it are lent again."""
_SLOW_TO_IMPORT = ("transformers", "transformers.modeling_utils", "torch._dynamo")


class ModelDiffers(AssertionError):
    """A model trains otherwise under an implementation than in one process; the message names the first difference."""


class ModelUndecided(HarnessError):
    """Nothing can be said of a model under an implementation; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class ModelReport:
    """What was compared, and agrees."""

    model: str
    implementation: str
    ranks: int
    steps: int
    tensors: int
    numbers: int

    def __str__(self) -> str:
        return (
            f"{self.model} under {self.implementation} on {self.ranks} ranks: {self.steps} steps are those of one process "
            f"(losses, {self.tensors} gradients and parameters, {self.numbers:,} numbers at each step)"
        )


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
        pool: Where worlds come from; the process's own by default.

    Raises:
        ModelDiffers: It trains otherwise, or does not train at all, on the ranks.
        ModelUndecided: It does not train, or does not repeat itself, in one process, roundings alone decide most of
            a quantity, or it hung once and not again.
        InvalidArgument: Transformers, Accelerate, the family or the implementation is not there, or fewer than two ranks.
    """
    if world_size < 2:
        raise InvalidArgument(f"world_size: expected at least 2 ranks, got {world_size}. One process is always run.")
    (target,), (reference,) = check_names((model,), (implementation,))
    training = ModelTraining(target, reference, world_size, steps)
    runner = _Runner(pool or default_pool(), timeout)
    alone = _alone(runner, replace(training, implementation=_ALONE))
    _check_numbers(str(target), alone)
    training = replace(training, leaves_unused=bool(alone.ranks[0].unused))
    run = runner.run(training, world_size)
    name = f"{target} under {implementation} on {world_size} ranks"
    if isinstance(run, str):
        raise ModelDiffers(f"{name} does not train as it does in one process: {run}")
    if run.odd:
        raise ModelDiffers(f"{name}: ranks hold different numbers, first of {run.odd}. Look for what is not reduced.")
    _compare(runner, training, (alone, run), name)
    compared = [values[0].numel() for quantity, values in run.quantities.items() if quantity != "loss"]
    return ModelReport(str(target), implementation, world_size, steps, len(compared), sum(compared))


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


@dataclass(frozen=True, slots=True)
class _Run:
    """One run: what all ranks computed, put together, and the first tensor of which they hold different numbers."""

    quantities: Quantities
    odd: str
    ranks: tuple[ModelSteps, ...]

    @property
    def start(self) -> Quantities:
        """Parameters before the first step."""
        held = [rank.start for rank in self.ranks]
        return {PARAMETER + name: [assembled([spans[name] for spans in held])[0]] for name in held[0]}


@dataclass(frozen=True, slots=True)
class _Runner:
    pool: Pool
    timeout: float

    def run(self, training: ModelTraining, size: int) -> _Run | str:
        """Return a run on `size` ranks, or why there is none.

        Raises:
            InvalidArgument: The model cannot be made.
            ModelUndecided: It hung once, and not again.
        """
        if isinstance(training.model, str):
            self.pool.expect(*_SLOW_TO_IMPORT)
        outcome = self._execute(training, size)
        if any(rank.fate is Fate.HUNG for rank in outcome.ranks):
            again = self._execute(training, size)  # the machine may have been slow
            if again.ok:
                raise ModelUndecided(
                    f"{training.model}: {outcome.cause}; run again, it came to its end. Nothing is known of it."
                )
            outcome = again
        if outcome.ok:
            return _together(outcome.values)
        error = next((rank.error for rank in outcome.ranks if rank.error is not None), None)
        if error is not None and error.type_name == "InvalidArgument":
            raise InvalidArgument(error.message)
        return outcome.describe()

    def _execute(self, training: ModelTraining, size: int) -> WorldOutcome:
        world = self.pool.world(size)
        try:
            return world.execute(
                train_here, (training,), timeout=self.timeout, name=f"model {training.model}", lasting=_IMPORTED
            )
        finally:
            world.release()


@functools.lru_cache(maxsize=4)
def _alone(runner: _Runner, training: ModelTraining) -> _Run:
    """Return the run in one process; the implementations of one model share it."""
    runs = [runner.run(training, 1) for _ in range(2)]
    first, again = runs
    if isinstance(first, str) or isinstance(again, str):
        raise ModelUndecided(
            f"{training.model} does not train in one process, so that nothing can be compared: {first}"
        )
    difference = first_difference(first.quantities, again.quantities, 0.0)
    if difference is not None:
        raise ModelUndecided(
            f"{training.model} does not repeat itself: two runs in one process differ, first in {difference}. Its forward must "
            "be a function of its weights and rows; leave out what is drawn at random."
        )
    return first


def _together(ranks: Sequence[ModelSteps]) -> _Run:
    quantities: Quantities = {"loss": [torch.stack(losses).mean(0) for losses in zip(*(rank.losses for rank in ranks))]}
    odd = ""
    for kind, steps in (
        (GRADIENT, zip(*(rank.gradients for rank in ranks))),
        (PARAMETER, zip(*(rank.parameters for rank in ranks))),
    ):
        for step, spans in enumerate(steps):
            for name in {name: None for rank in spans for name in rank}:
                tensor, rank = assembled([held.get(name, ()) for held in spans])
                if rank is not None:
                    odd = odd or f"{kind}{name} at step {step} (ranks 0 and {rank})"
                quantities.setdefault(kind + name, []).append(tensor)
    return _Run(quantities, odd, tuple(ranks))


def _check_numbers(model: str, alone: _Run) -> None:
    """NaN equals nothing, and zeros are equal whatever they came from."""
    for name, values in alone.quantities.items():
        if any(bool(value.isnan().any()) for value in values):
            raise ModelUndecided(f"{model} computes NaN in one process, first in {name}. Give it other weights.")
    nothing = nothing_trained(alone.start, alone.quantities)
    if nothing:
        raise ModelUndecided(f"{model} has {nothing} in one process: nothing is trained.")


def _compare(runner: _Runner, training: ModelTraining, runs: tuple[_Run, _Run], name: str) -> None:
    alone, run = runs
    decided = Decided()
    found = first_difference(alone.quantities, run.quantities, ROUNDINGS, None, decided, alone.start)
    if found is not None and found.error is not None:

        def disturbed(seed: int) -> list[tuple[Quantities, Quantities]]:
            plain = replace(training, implementation=_ALONE, leaves_unused=False, seed=seed)
            again = (runner.run(plain, 1), runner.run(replace(training, seed=seed), training.ranks))
            moved: list[Any] = [other for other in again if not isinstance(other, str)]
            if len(moved) < len(again):
                raise ModelUndecided(f"{name} differs, {found}, and does not train with other roundings: {again}")
            return [(one.quantities, other.quantities) for one, other in zip(runs, moved)]

        decided = Decided()
        found = beyond_roundings(alone.quantities, run.quantities, ROUNDINGS, disturbed, decided, alone.start)
    if found is not None and any(rank.drew for rank in run.ranks):
        raise ModelUndecided(
            f"{name} differs from one process, {found}, and its forward draws random numbers, which cannot be the same for other "
            "rows. Give a function that makes the model without that."
        )
    if found is not None:
        raise ModelDiffers(f"{name} differs from one process: {found}. {suggestion(found, training.ranks)}")
    decided.excused.update(vanishing([alone.quantities, run.quantities], roundoff=0.0))
    if not decided.enough:
        what = ", ".join(decided.unknown[:5]) or "what is compared"
        raise ModelUndecided(f"{name}: roundings alone move most of {what} as far as it differs.")
