"""Does a team's own training loop give the same result on every world size, and if not, what differs first?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fsdp_testing.checkers.divergence import DECISIVE
from fsdp_testing.checkers.tensors import difference
from fsdp_testing.errors import InvalidArgument, WorldFailed
from fsdp_testing.ledger.late_delivery import deliver_late
from fsdp_testing.pool import Pool, default_pool
from fsdp_testing.pool.targets import Target, resolve, target_of
from fsdp_testing.pool.world import World, current_world
from fsdp_testing.programs.fresh_memory import filled_with_garbage
from fsdp_testing.records.tolerance import UNIT_ROUNDOFF
from fsdp_testing.training_check import causes
from fsdp_testing.training_check.evidence import StepEvidence, Witness

if TYPE_CHECKING:
    import torch

Train = Callable[[World], Mapping[str, Any]]
Quantities = dict[str, list["torch.Tensor"]]

ROUNDINGS = 4096
"""Roundings by which two correct runs may differ: sums over ranks and batches in any order, over a short training."""


class TrainingDiffers(AssertionError):
    """A training loop gives different results on different worlds; the message names the first quantity and step."""


@dataclass(frozen=True, slots=True)
class _Run:
    """One run of the loop: per rank what it returned, each quantity as a list of steps, and what it saw."""

    size: int
    ranks: tuple[Quantities, ...]
    evidence: tuple[tuple[StepEvidence, ...], ...]

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

    Args:
        train: An importable function.
        world_sizes: Sizes to run; the first is the reference.
        backend: Backend of the worlds.
        timeout: Seconds until a rank counts as hung.
        roundings: Admissible difference, in units of roundoff of the dtype times the largest number of the quantity; at most
            a sixteenth of that number.
        pool: Where worlds come from; the process's own by default.

    Raises:
        TrainingDiffers: Names the first quantity and step that differ, and the cause, if what the ranks saw shows one, or
            what the difference suggests. Also when the first world returns NaN.
        WorldFailed: A rank raised, died or hung.
        InvalidArgument: `train` is not importable, returns something else, or a size is not usable.
    """
    if not world_sizes:
        raise InvalidArgument("check_training: expected at least one world size, got none. Give world_sizes=(1, 2).")
    target = target_of(train)
    lender = pool or default_pool()
    reference = _run(lender, target, world_sizes[0], backend, timeout)
    _check_numbers(target, reference)
    again = _run(lender, target, world_sizes[0], backend, timeout)
    difference = first_difference(reference.ranks[0], again.ranks[0], 0.0)
    if difference is not None:
        raise TrainingDiffers(
            f"{target}: two runs on {reference.name} differ: {difference}. "
            "The loop is not a function of its seeds; seed every generator it uses, then compare world sizes."
        )
    _check_ranks(target, reference, reference)
    for size in world_sizes[1:]:
        other = _run(lender, target, size, backend, timeout)
        _check_ranks(target, other, reference)
        found = first_difference(reference.ranks[0], other.ranks[0], roundings)
        if found is not None:
            cause = causes.between_sizes(reference.evidence, other.evidence, size) or suggestion(found, size)
            raise TrainingDiffers(f"{target}: {other.name} differs from {reference.name}: {found}. {cause}")


def train_here(target: Target) -> tuple[Quantities, tuple[StepEvidence, ...]]:
    """Run the loop in this rank and return what it gave, each quantity as a list of steps, and what was seen."""
    import torch

    witness = Witness()
    # Luck is to help nobody: neither a quick network nor memory full of zeros.
    with witness.watch(), deliver_late(), filled_with_garbage():
        returned = resolve(target)(current_world())
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
    return result, tuple(witness.steps)


@dataclass(frozen=True, slots=True)
class _Difference:
    """Where two runs differ first."""

    quantity: str
    step: int
    steps: int
    sentence: str
    ratio: float | None = None
    numbers: int = 0

    def __str__(self) -> str:
        at = f" at step {self.step}" if self.steps > 1 else ""
        return f"{self.quantity}{at} {self.sentence}"


def _run(pool: Pool, target: Target, size: int, backend: str, timeout: float) -> _Run:
    world = pool.world(size, backend)
    try:
        outcome = world.execute(train_here, (target,), timeout=timeout, name=f"check_training({target})")
    finally:
        world.release()
    if not outcome.ok:
        error = outcome.ranks[0].error
        if error is not None and error.type_name == "InvalidArgument":
            raise InvalidArgument(error.message)
        raise WorldFailed(outcome.describe())
    return _Run(size, tuple(value for value, _ in outcome.values), tuple(steps for _, steps in outcome.values))


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


def _metric_fact(found: _Difference, run: _Run, reference: _Run) -> causes.MetricFact:
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


def first_difference(reference: Quantities, other: Quantities, roundings: float) -> _Difference | None:
    """Return the first difference in the order of steps, and among the quantities of one step in the order returned."""
    for name in [*reference, *(name for name in other if name not in reference)]:
        if name not in reference or name not in other:
            return _Difference(name, 0, 1, "is returned by one of them only")
        if len(reference[name]) != len(other[name]):
            return _Difference(name, 0, 1, f"has {len(other[name])} steps, expected {len(reference[name])}")
    recorded = {name: steps for name, steps in reference.items() if len(steps) > 1}
    final = [name for name in reference if name not in recorded]
    length = max((len(steps) for steps in recorded.values()), default=0)
    order = [(name, step) for step in range(length) for name, steps in recorded.items() if step < len(steps)]
    for name, step in [*order, *((name, 0) for name in final)]:
        found = _compare(name, step, reference[name], other[name], roundings)
        if found is not None:
            return found
    return None


def _compare(
    name: str, step: int, references: Sequence[torch.Tensor], others: Sequence[torch.Tensor], roundings: float
) -> _Difference | None:
    left, right, steps = references[step], others[step], len(references)
    if left.shape != right.shape or left.dtype != right.dtype:
        sentence = f"is {right.dtype}{list(right.shape)}, expected {left.dtype}{list(left.shape)}"
        return _Difference(name, step, steps, sentence)
    if not left.numel():
        return None
    one, two = left.double().reshape(-1), right.double().reshape(-1)
    unit = UNIT_ROUNDOFF.get(str(left.dtype).removeprefix("torch."), 0.0)
    largest = float(one[one.isfinite()].abs().max()) if bool(one.isfinite().any()) else 0.0
    # So many roundings of a low precision would admit anything.
    found = difference(two, one, min(roundings * unit, DECISIVE) * largest)
    if not found.exceeded:
        return None
    sentence = f"is off by {found.error:.3g} (bound {found.bound:.3g}), most in element {found.position}: {found.text}"
    return _Difference(name, step, steps, sentence, _ratio(one, two), one.numel())


def _ratio(one: torch.Tensor, two: torch.Tensor) -> float | None:
    """The factor between two tensors, if it is one factor for all elements."""
    filled = one.abs() > 1e-12 * float(one.abs().max())
    if not bool(filled.any()):
        return None
    ratios = two[filled] / one[filled]
    middle = float(ratios.median())
    return middle if bool(((ratios - middle).abs() <= 1e-6 * abs(middle)).all()) else None


def suggestion(found: _Difference, size: int) -> str:
    """Return what a difference from the reference world suggests, where the evidence shows no cause."""
    ratio = found.ratio
    if ratio is not None and abs(ratio - size) < 1e-6 * size:
        return f"It is exactly {size} times as large: a sum over ranks where a mean is meant."
    if ratio is not None and abs(ratio - 1 / size) < 1e-6:
        return f"It is exactly 1/{size} of it: divided by the world size once too often, or not summed."
    if ratio is not None and found.numbers > 1:  # of one number, a ratio says nothing
        return f"Every element is {ratio:.6g} times as large: something is scaled by the number of ranks or steps."
    if found.steps > 1 and found.step > 0:
        return (
            f"Step {found.step - 1} still agrees: look at what step {found.step} does for the first time "
            "(a no_sync boundary, a micro-batch that is not reduced, a schedule that counts ranks)."
        )
    return "Look for data that is not split evenly, a random number drawn per rank, or a gradient that is not reduced."
