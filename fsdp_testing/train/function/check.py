"""Does a team's own training loop give the same result on every world size, and if not, what differs first?"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdp_testing.errors import HarnessError, InvalidArgument, WorldFailed
from fsdp_testing.ranks.pool import Pool, default_pool
from fsdp_testing.ranks.pool.targets import Target, target_of
from fsdp_testing.ranks.pool.world import World
from fsdp_testing.train.function import causes
from fsdp_testing.train.function.comparison import (
    CLEAR_ROUNDINGS,
    ROUNDINGS,
    Decided,
    Difference,
    Quantities,
    beyond_roundings,
    first_difference,
    suggestion,
)
from fsdp_testing.train.function.running import Run, Runner
from fsdp_testing.train.function.terms import wrong_term
from fsdp_testing.train.function.whole import (
    END,
    PARAMETER,
    comparable,
    loss_table,
    nothing_trained,
    only,
    rescaled,
    shapes_of,
    vanishing,
)

Train = Callable[[World], Mapping[str, Any]]
View = Callable[["Run"], list[Quantities]]
"""What of a run is compared, for each of its ranks: what the loop returned, or what was observed."""


class TrainingDiffers(AssertionError):
    """A training loop gives different results on different worlds; the message names the first quantity and step."""


class TrainingUndecided(HarnessError):
    """Roundings alone may make what differs: nothing is known of the loop. The message says what to change."""


class TrainingPartlyUndecided(UserWarning):
    """Worlds agree, and of some numbers nothing is known, since roundings alone move them that far."""


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
    Parameters and gradients are compared at each optimizer step, and parameters at the end, without being returned. The loop
    finds torchrun's variables set, and may make and destroy its default process group.

    Args:
        train: An importable function.
        world_sizes: Sizes to run; the first is the reference.
        backend: Backend of the worlds.
        timeout: Seconds until a rank counts as hung.
        roundings: What passes at once, in units of roundoff of the dtype times the largest number of the quantity; at most 4
            in dtypes narrower than float32. What exceeds it is judged by how far roundings move the loop (`disturbance`).
        pool: Where worlds come from; the process's own by default.

    Raises:
        TrainingDiffers: Worlds, or the ranks of one, differ. Names the first quantity and step that differ, and the cause, if
            what the ranks saw shows one, or what the difference suggests. Also when the first world returns NaN.
        TrainingUndecided: Roundings alone move most of a quantity as far as worlds differ, nothing was trained or compared, or
            the loop hung once and not again.
        WorldFailed: A rank raised or died, or the loop hung twice.
        InvalidArgument: `train` is not importable, returns something else, or a size is not usable.
    """
    if not world_sizes:
        raise InvalidArgument("check_training: expected at least one world size, got none. Give world_sizes=(1, 2).")
    runner = Runner(pool or default_pool(), target_of(train), backend, timeout)
    reference = runner.run(world_sizes[0])
    _check_numbers(runner.target, reference)
    _check_repeats(runner, reference)
    _check_ranks(runner.target, reference, reference)
    unknown = _nothing_compared(reference)
    for size in world_sizes[1:]:
        other = runner.run(size, shapes=shapes_of(reference.steps))
        _check_ranks(runner.target, other, reference)
        pair = _Pair(runner, reference, other, roundings)
        _compare(pair)
        unknown += pair.unknown()
    unknown += runner.unsteady
    if unknown:
        raise TrainingUndecided(f"{runner.target}: " + "\n".join(dict.fromkeys(unknown)))


@dataclass(frozen=True, slots=True)
class _Pair:
    """The reference world and another one; what is undecided of them."""

    runner: Runner
    reference: Run
    other: Run
    roundings: float
    decided: Decided = field(default_factory=Decided)

    def difference(self, view: View, decided: Decided) -> Difference | None:
        """Return where both differ beyond what roundings do, in what `view` shows of each rank of a run."""
        runs, start = (self.reference, self.other), self.reference.start
        one, two = (view(run)[0] for run in runs)
        at_once = Decided()
        found = first_difference(one, two, self.roundings, None, at_once, start)
        if found is None:
            decided.add(at_once)
        if found is None or found.error is None:
            return found
        if not any(size == self.other.size for size, _ in self.runner.kept):
            _check_repeats(self.runner, self.other)

        def disturbed_pairs(seed: int) -> list[tuple[Quantities, Quantities]]:
            moved = [(run, self._disturbed(run, seed, found)) for run in runs]
            return [pair for run, there in moved for pair in zip(view(run), view(there))]

        return beyond_roundings(one, two, self.roundings, disturbed_pairs, decided, start)

    def _disturbed(self, run: Run, seed: int, found: Difference) -> Run:
        try:
            return self.runner.disturbed(run, seed)
        except WorldFailed as why:
            raise TrainingUndecided(
                f"{self.runner.target}: {self.other.name} differs from {self.reference.name}: {found}. To know whether roundings "
                f"alone do that, it is run with other ones, and does not come to its end on {run.name} then: {why}"
            ) from why

    def unknown(self) -> list[str]:
        """Return what keeps a pass from being one; warns of what else is not known."""
        decided, target = self.decided, self.runner.target
        said = []
        lines = list(decided.open.values())
        more = f", and {len(lines) - 5} more" if len(lines) > 5 else ""
        moved = f"roundings alone move these numbers as far as worlds differ: {'; '.join(lines[:5])}{more}"
        if not decided.enough:
            what = ", ".join(decided.unknown[:5]) or "what is compared"
            return [
                f"{moved}. "
                * bool(lines)
                + f"Roundings decide most of {what}, so nothing is known of the loop. Train fewer steps, in float32 or float64 "
                "without autocast, or with an optimizer that does not divide gradients by their size."
            ]
        if lines:
            said.append(f"{moved}. Of these nothing is known; the rest agrees.")
        said += _not_compared(self.reference, self.other)
        if not any(name in self.other.ranks[0] or name.startswith((PARAMETER, END)) for name in decided.numbers):
            said.append(
                "The loop returns nothing that is compared, and has no parameter of which could be compared what it became."
            )
            return [" ".join(said)]
        if said:
            warnings.warn(f"{target}: {' '.join(said)}", TrainingPartlyUndecided, stacklevel=3)
        return []


def _compare(pair: _Pair) -> None:
    """Compare what both returned, and then what was observed of them.

    Raises:
        TrainingDiffers: They differ.
    """
    reference, other = pair.reference, pair.other
    roundoff = max((one.roundoff for run in (reference, other) for rank in run.evidence for one in rank), default=0.0)
    pair.decided.excused.update(vanishing([reference.observed, other.observed], roundoff))
    found = pair.difference(lambda run: list(run.ranks), pair.decided) or _other_steps(reference, other)
    observed = _observed_difference(pair) if found is None or found.error is not None else None
    if observed is not None and (found is None or _is_before(observed, found)):
        found = observed
    if found is not None:
        cause = (
            causes.of_rate(found, other.size)
            or causes.between_sizes(reference.evidence, other.evidence, other.size)
            or wrong_term(reference.observed, other.observed, other.terms, CLEAR_ROUNDINGS)
            or suggestion(found, other.size)
        )
        table = loss_table(reference.observed, other.observed, reference.size, other.size)
        raise TrainingDiffers(
            "\n".join([f"{pair.runner.target}: {other.name} differs from {reference.name}: {found}. {cause}", *table])
        )


def _observed_difference(pair: _Pair) -> Difference | None:
    """Return where losses, gradients, parameters and the like differ; what backward was called on says nothing by itself."""
    size = pair.other.size

    def compare(names: Sequence[str], factors: Sequence[float]) -> Difference | None:
        def view(run: Run) -> list[Quantities]:
            return [only(rescaled(run.observed, factors if run.size == size else ()), names)]

        return pair.difference(view, Decided())

    names, _ = comparable(pair.reference.observed, pair.other.observed, pair.roundings, compare)
    trained = [name for name in names if name != "loss"]
    found = pair.difference(lambda run: [only(run.observed, trained)], pair.decided)
    if found is None or "loss" not in names or any("loss" in name.lower() for name in pair.other.ranks[0]):
        return found
    return compare(names, ()) or found


def _is_before(one: Difference, other: Difference) -> bool:
    """Whether one belongs to an earlier step; what is recorded once belongs to the end."""
    steps = [found.step if found.steps > 1 else math.inf for found in (one, other)]
    return steps[0] < steps[1]


def _other_steps(reference: Run, other: Run) -> Difference | None:
    """Return that worlds step their optimizers another number of times, or one of them fewer parameters."""
    if reference.counts[0] != other.counts[0]:
        said = f"has {other.counts[0]} steps, expected {reference.counts[0]}: the number of steps depends on the number of ranks"
        return Difference("the optimizer", 0, 1, said)
    if other.own or not other.parameters or {*other.parameters} - {*reference.parameters}:
        return None  # parts and other names have no counterparts; that is told
    lacking = sorted({*reference.parameters} - {*other.parameters})
    return Difference(lacking[0], 0, 1, f"is trained by {reference.name} only") if lacking else None


def _not_compared(reference: Run, other: Run) -> list[str]:
    """Return sentences on parameters that could not be compared."""
    said = []
    if other.own:
        said.append(
            f"Ranks of {other.name} have parts of their own by the same name, {len(other.own)} parameters, first {other.own[0]}: "
            "these are not compared. Return what the ranks compute together."
        )
    unreadable = next((seen.unreadable for run in (reference, other) for seen in run.steps[0] if seen.unreadable), "")
    if unreadable:
        said.append(f"Parameters could not be read ({unreadable}), and only what the loop returns is compared.")
    elif not other.own and (odd := sorted({*reference.parameters} ^ {*other.parameters})):
        said.append(
            f"{len(odd)} parameters have this name in one of both worlds only, and are not compared: first {odd[0]}."
        )
    return said


def _nothing_compared(run: Run) -> list[str]:
    """Return why a comparison with a run would say nothing; empty if it says something."""
    returned = any(value.numel() for values in run.ranks[0].values() for value in values)
    if not returned and not any(name.startswith((PARAMETER, END)) for name in run.observed):
        said = (
            "nothing is compared: the loop returns nothing, and no step of an optimizer was seen of which parameters can be "
            "compared. Return what it computes, as {'loss': losses, 'weight': model.weight.detach()}."
        )
        return [said]
    strange = any(seen.strange for rank in run.steps for seen in rank)
    nothing = nothing_trained(run.start, run.observed, gradients_seen=not strange)
    if not nothing:
        return []
    said = (
        f"has {nothing} in any step of {run.name}: nothing is trained, and nothings are equal whatever they came from. Look for "
        "gradients that are cleared before the step, a loss that does not depend on the model, or a learning rate of zero."
    )
    return [said]


def _check_repeats(runner: Runner, run: Run) -> None:
    again = runner.run(run.size)
    difference = first_difference(run.ranks[0], again.ranks[0], 0.0)
    if difference is not None:
        raise TrainingDiffers(
            f"{runner.target}: two runs on {run.name} differ: {difference}. "
            "The loop is not a function of its seeds; seed every generator it uses, then compare world sizes."
        )


def _check_numbers(target: Target, run: Run) -> None:
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


def _check_ranks(target: Target, run: Run, reference: Run) -> None:
    if len(set(run.counts)) > 1:
        raise TrainingDiffers(
            f"{target}: the ranks of {run.name} make different numbers of optimizer steps: {', '.join(map(str, run.counts))}. "
            "Cause: a rank stops or skips a step by a number of its own (an early stop on a local value, an uneven number of "
            "batches, a branch that depends on the rank)."
        )
    for rank, quantities in enumerate(run.ranks[1:], start=1):
        found = first_difference(run.ranks[0], quantities, 0.0)
        if found is not None:
            cause = causes.between_ranks(run.evidence, _metric_fact(found, run, reference)) or _RANKS_DIFFER
            raise TrainingDiffers(f"{target}: rank {rank} of {run.name} differs from rank 0: {found}. {cause}")
    for apart in run.disagreements:
        if apart.decides:
            fact = causes.MetricFact(apart.name, mean_agrees=False, sum_agrees=False)
            cause = causes.between_ranks(run.evidence, fact) or _COPIES_DIFFER
            raise TrainingDiffers(f"{target}: ranks of {run.name} do not hold the same: {apart}. {cause}")


def _metric_fact(found: Difference, run: Run, reference: Run) -> causes.MetricFact:
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
_COPIES_DIFFER = (
    "Each rank changes its own copy of what all began with: look for a gradient that is not reduced, or a step that one rank "
    "skips or makes otherwise."
)
