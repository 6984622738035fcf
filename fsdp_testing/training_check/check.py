"""Does a team's own training loop give the same result on every world size, and if not, what differs first?"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from fsdp_testing.errors import HarnessError, InvalidArgument, WorldFailed
from fsdp_testing.ledger.late_delivery import deliver_late
from fsdp_testing.pool import Pool, default_pool
from fsdp_testing.pool.targets import Target, resolve, target_of
from fsdp_testing.pool.world import World, current_world
from fsdp_testing.programs.fresh_memory import filled_with_garbage
from fsdp_testing.training_check import causes
from fsdp_testing.training_check.comparison import (
    ROUNDINGS,
    Decided,
    Difference,
    Quantities,
    beyond_roundings,
    first_difference,
    suggestion,
)
from fsdp_testing.training_check.disturbance import disturbed
from fsdp_testing.training_check.evidence import StepEvidence, Witness
from fsdp_testing.training_check.launch import as_torchrun_starts
from fsdp_testing.training_check.observation import Observer, StepSeen
from fsdp_testing.training_check.terms import Terms, wrong_term
from fsdp_testing.training_check.whole import comparable, loss_table, only, together

Train = Callable[[World], Mapping[str, Any]]
View = Callable[["_Run"], list[Quantities]]
"""What of a run is compared, for each of its ranks: what the loop returned, or what was observed."""


class TrainingDiffers(AssertionError):
    """A training loop gives different results on different worlds; the message names the first quantity and step."""


class TrainingUndecided(HarnessError):
    """Roundings alone may make what differs: nothing is known of the loop. The message says what to change."""


class TrainingPartlyUndecided(UserWarning):
    """Worlds agree, and of some numbers nothing is known, since roundings alone move them that far."""


@dataclass(frozen=True, slots=True)
class _Run:
    """One run of the loop.

    Attributes:
        size: Number of ranks.
        ranks: What each returned, each quantity as a list of steps.
        evidence: What each saw.
        observed: What no rank returned: losses, gradients and parameters of all ranks, where these agree on them.
        terms: What each backward pass of each rank added to gradients, step by step.
    """

    size: int
    ranks: tuple[Quantities, ...]
    evidence: tuple[tuple[StepEvidence, ...], ...]
    observed: Quantities
    terms: tuple[tuple[Terms, ...], ...] = ()

    @property
    def name(self) -> str:
        return f"a world of {self.size}"


def check_training(
    train: Train,
    *,
    world_sizes: Sequence[int] = (1, 2, 3),
    backend: str = "gloo",
    timeout: float = 60.0,
    roundings: float = ROUNDINGS,
    pool: Pool | None = None,
) -> None:
    """Run `train` on worlds of several sizes and compares what it returns.

    `train(world)` must train on the same global data whatever the size, each rank on its share, and return named tensors:
    one for a final quantity, a list for what is recorded at every step. All ranks and all worlds must return the same.
    Parameters and gradients are compared at each optimizer step without being returned. The loop finds torchrun's variables
    set, and may make and destroy its default process group.

    Args:
        train: An importable function.
        world_sizes: Sizes to run; the first is the reference.
        backend: Backend of the worlds.
        timeout: Seconds until a rank counts as hung.
        roundings: Admissible difference, in units of roundoff of the dtype times the largest number of the quantity; at most
            a sixteenth of that number, and at most 4 in dtypes narrower than float32. What exceeds it is judged by how far
            roundings move the loop (`disturbance`).
        pool: Where worlds come from; the process's own by default.

    Raises:
        TrainingDiffers: Names the first quantity and step that differ, and the cause, if what the ranks saw shows one, or
            what the difference suggests. Also when the first world returns NaN.
        TrainingUndecided: Roundings alone move most of what is returned as far as worlds differ.
        WorldFailed: A rank raised, died or hung.
        InvalidArgument: `train` is not importable, returns something else, or a size is not usable.
    """
    if not world_sizes:
        raise InvalidArgument("check_training: expected at least one world size, got none. Give world_sizes=(1, 2).")
    runner = _Runner(pool or default_pool(), target_of(train), backend, timeout)
    target = runner.target
    reference = runner.run(world_sizes[0])
    _check_numbers(target, reference)
    _check_repeats(runner, reference)
    _check_ranks(target, reference, reference)
    for size in world_sizes[1:]:
        other = runner.run(size)
        _check_ranks(target, other, reference)
        names = comparable(reference.observed, other.observed, roundings)[0]
        for view in (lambda run: list(run.ranks), lambda run, names=names: [only(run.observed, names)]):
            found = first_difference(view(reference)[0], view(other)[0], roundings)
            if found is not None:
                _judge(runner, (reference, other), view, (found, roundings))


def _judge(runner: _Runner, runs: tuple[_Run, _Run], view: View, known: tuple[Difference, float]) -> None:
    """Decide a difference beyond what a count of roundings admits: a mistake, or a loop that amplifies roundings."""
    reference, other = runs
    found, roundings = known
    if found.error is not None:
        _check_repeats(runner, other)
        decided = Decided()

        def disturbed_pairs(seed: int) -> list[tuple[Quantities, Quantities]]:
            moved = [(run, runner.disturbed(run.size, seed)) for run in runs]
            return [pair for run, there in moved for pair in zip(view(run), view(there))]

        beyond = beyond_roundings(view(reference)[0], view(other)[0], roundings, disturbed_pairs, decided)
        if beyond is None:
            _tell_undecided(runner.target, decided)
            return
        found = beyond
    cause = (
        causes.between_sizes(reference.evidence, other.evidence, other.size)
        or wrong_term(reference.observed, other.observed, other.terms, roundings)
        or suggestion(found, other.size)
    )
    table = loss_table(reference.observed, other.observed, reference.size, other.size)
    raise TrainingDiffers(
        "\n".join([f"{runner.target}: {other.name} differs from {reference.name}: {found}. {cause}", *table])
    )


def _tell_undecided(target: Target, decided: Decided) -> None:
    if not decided.open:
        return
    what = "; ".join(sentence for _, sentence in list(decided.open.values())[:5])
    more = f", and {len(decided.open) - 5} more" if len(decided.open) > 5 else ""
    sentence = f"{target}: roundings alone move these numbers as far as worlds differ: {what}{more}"
    if not decided.enough:
        raise TrainingUndecided(
            f"{sentence}. They are most of what is compared, so nothing is known of the loop. Train fewer steps, in "
            "float32 or float64 without autocast, or with an optimizer that does not divide gradients by their size."
        )
    warnings.warn(f"{sentence}. Of these nothing is known; the rest agrees.", TrainingPartlyUndecided, stacklevel=4)


def train_here(target: Target, seed: int) -> tuple[Quantities, tuple[StepEvidence, ...], tuple[StepSeen, ...]]:
    """Run the loop in this rank and return what it gave, each quantity as a list of steps, and what was seen.

    Roundings are left as they are with seed 0, and made differently on every rank with another one.
    """
    import torch

    witness, observer, world = Witness(), Observer(), current_world()
    # Luck is to help nobody: neither a quick network nor memory full of zeros.
    roundings = disturbed(seed * world.size + world.rank) if seed else nullcontext()
    with as_torchrun_starts(world), witness.watch(), observer.watch(), deliver_late(), filled_with_garbage(), roundings:
        returned = resolve(target)(world)
    if not isinstance(returned, Mapping):
        raise InvalidArgument(f"{target}: expected a mapping of names to tensors, got {type(returned).__name__}.")
    result: Quantities = {}
    for name, value in returned.items():
        steps = list(value) if isinstance(value, (list, tuple)) else [value]
        wrong = [type(step).__name__ for step in steps if not isinstance(step, (torch.Tensor, int, float))]
        if not isinstance(name, str) or wrong:
            raise InvalidArgument(
                f"{target}: expected names with a tensor or a list of tensors, got {name!r}: "
                f"{wrong or type(value).__name__}. Return what the loop computes, detached."
            )
        result[name] = [torch.as_tensor(step).detach().cpu().clone() for step in steps]
    observer.finish()
    return result, _with_kept_gradients(observer.of_steps(witness.steps), observer.steps), tuple(observer.steps)


def _with_kept_gradients(evidence: Sequence[StepEvidence], steps: Sequence[StepSeen]) -> tuple[StepEvidence, ...]:
    """Note as local the backward passes of a sharded model that left nothing to step by: it keeps what it does not reduce."""
    if len(evidence) != len(steps):
        return tuple(evidence)
    return tuple(
        replace(one, local=one.backwards) if one.gathered and seen.losses and not seen.given else one
        for one, seen in zip(evidence, steps)
    )


@dataclass(frozen=True, slots=True)
class _Runner:
    """How the loop is run on a world; disturbed runs are kept by size and seed."""

    pool: Pool
    target: Target
    backend: str
    timeout: float
    kept: dict[tuple[int, int], _Run] = field(default_factory=dict)

    def disturbed(self, size: int, seed: int) -> _Run:
        """Return the run on `size` ranks whose roundings are made differently, by each seed otherwise."""
        if (size, seed) not in self.kept:
            self.kept[size, seed] = self.run(size, seed)
        return self.kept[size, seed]

    def run(self, size: int, seed: int = 0) -> _Run:
        """Run the loop on `size` ranks; with another seed than 0, disturbed."""
        world = self.pool.world(size, self.backend)
        name = f"check_training({self.target})"
        try:
            outcome = world.execute(train_here, (self.target, seed), timeout=self.timeout, name=name)
        finally:
            world.release()
        if not outcome.ok:
            error = outcome.ranks[0].error
            if error is not None and error.type_name == "InvalidArgument":
                raise InvalidArgument(error.message)
            raise WorldFailed(outcome.describe())
        returned, evidence, steps = (tuple(column) for column in zip(*outcome.values))
        observed, disagreements = together(steps)
        kept = {n: values for n, values in observed.items() if not any(n.startswith(d.kind) for d in disagreements)}
        return _Run(size, returned, evidence, kept, tuple(tuple(one.terms for one in rank) for rank in steps))


def _check_repeats(runner: _Runner, run: _Run) -> None:
    again = runner.run(run.size)
    difference = first_difference(run.ranks[0], again.ranks[0], 0.0)
    if difference is not None:
        raise TrainingDiffers(
            f"{runner.target}: two runs on {run.name} differ: {difference}. "
            "The loop is not a function of its seeds; seed every generator it uses, then compare world sizes."
        )


def _check_numbers(target: Target, run: _Run) -> None:
    """NaN equals nothing, and everything that is NaN looks alike: no verdict could be trusted."""
    for rank, quantities in enumerate(run.ranks):
        found = [
            f"{name} at step {step}" if len(steps) > 1 else name
            for name, steps in quantities.items()
            for step, value in enumerate(steps)
            if bool(value.isnan().any())
        ]
        if found:
            raise TrainingDiffers(
                f"{target}: rank {rank} of {run.name} returns NaN, first in {found[0]} ({len(found)} in all), so that "
                "nothing can be compared. The loop diverges, returns memory that nobody wrote to, or reads a "
                "collective's result before it waits for it: until then it is NaN here."
            )


def _check_ranks(target: Target, run: _Run, reference: _Run) -> None:
    for rank, quantities in enumerate(run.ranks[1:], start=1):
        found = first_difference(run.ranks[0], quantities, 0.0)
        if found is not None:
            cause = causes.between_ranks(run.evidence, _metric_fact(found, run, reference)) or _RANKS_DIFFER
            raise TrainingDiffers(f"{target}: rank {rank} of {run.name} differs from rank 0: {found}. {cause}")


def _metric_fact(found: Difference, run: _Run, reference: _Run) -> causes.MetricFact:
    """How a quantity that ranks do not share is to that of the reference world: perhaps its mean or its sum."""
    import torch

    def agrees(scale: float) -> bool:
        wanted = reference.ranks[0].get(found.quantity, [])
        given = [rank.get(found.quantity, []) for rank in run.ranks]
        if run.size == reference.size or len(wanted) <= found.step or any(len(one) <= found.step for one in given):
            return False
        one, others = wanted[found.step].double(), [steps[found.step].double() for steps in given]
        if any(other.shape != one.shape for other in others):
            return False
        return torch.allclose(torch.stack(others).sum(dim=0) * scale, one, rtol=1e-6, atol=0.0)

    return causes.MetricFact(found.quantity, agrees(1.0 / run.size), agrees(1.0))


_RANKS_DIFFER = (
    "Ranks that compute the same must return the same: look for a metric or gradient that is not reduced, a seed that "
    "depends on the rank, or dropout that is out of step."
)
