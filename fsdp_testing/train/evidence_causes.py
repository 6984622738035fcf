"""Which causes does the evidence of steps show: seeds, reductions, random numbers, factors of gradients? Pure.

Each function returns a sentence, or nothing where the cause was not seen; `causes` has the order in which they are asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_testing.train.comparison import Difference
from fsdp_testing.train.evidence import StepEvidence
from fsdp_testing.train.quantities import Kind

Steps = Sequence[StepEvidence]

CLOSE = 1e-6
"""Relative; gradients of other world sizes differ by roundings."""
ROUNDINGS = 8
"""Roundings of a narrow dtype in which a norm may differ: few, since those of many numbers cancel in it."""


@dataclass(frozen=True, slots=True)
class MetricFact:
    """What is known of a quantity that differs between ranks.

    Attributes:
        name: Its name.
        mean_agrees: Its mean over ranks is what the reference world gives.
        sum_agrees: Its sum is.
    """

    name: str
    mean_agrees: bool
    sum_agrees: bool


def between_ranks(ranks: Sequence[Steps], metric: MetricFact) -> str:
    """Return why the ranks of one world give different things; empty where the evidence does not show it.

    Args:
        ranks: What each rank saw, step by step.
        metric: The quantity that differs first.
    """
    for step, seen in enumerate(zip(*ranks)):
        cause = _seeds(seen, step) or _not_reduced(seen, step) or _generators(seen, step)
        if cause:
            return cause
    return _metric(ranks, metric)


def between_sizes(reference: Sequence[Steps], other: Sequence[Steps], size: int) -> str:
    """Return why a world of `size` gives another result than the reference world.

    Args:
        reference: What each rank of the reference world saw.
        other: What each rank of the other world saw.
        size: Number of ranks of the other world.
    """
    for step, (before, after) in enumerate(zip(zip(*reference), zip(*other))):
        cause = _not_reduced(after, step) or _accumulation(before, after, step) or _scaled(before, after, step, size)
        if cause:
            return cause
        random = _random(after, step)
        if random:
            return random
    return ""


def of_rate(difference: Difference, size: int) -> str:
    """Return the cause where the first difference of a world of `size` is a learning rate; empty where it is not."""
    if difference.quantity.kind is not Kind.RATE:
        return ""
    times = f"{difference.ratio:.6g} times that of one process" if difference.ratio is not None else "by no one factor"
    scaled = (
        f" is multiplied by the number of ranks ({difference.ratio:.6g} times)"
        if difference.ratio is not None and abs(difference.ratio - size) < CLOSE * size
        else f" depends on the number of ranks ({times})"
    )
    return f"Cause: the learning rate{scaled}. One process with the rows of all ranks takes the mean of the same gradients."


def _seeds(seen: Steps, step: int) -> str:
    seeds = [one.seed for one in seen]
    if len(set(seeds)) == 1 or any(one.gathered for one in seen):
        return ""
    different_weights = len({one.weights for one in seen}) > 1
    if not different_weights and not any(one.drew for one in seen):
        return ""
    first = next(rank for rank, seed in enumerate(seeds) if seed != seeds[0])
    effect = "ranks start from different weights" if different_weights else "ranks draw different random numbers"
    return (
        f"Cause: the seed depends on the rank. At step {step} torch.initial_seed() is {seeds[0]} on rank 0 and "
        f"{seeds[first]} on rank {first}, and the {effect}. Seed every rank alike, or broadcast what is drawn."
    )


def _not_reduced(seen: Steps, step: int) -> str:
    """The last backward pass before the step was reduced on no rank."""
    if len(seen) < 2 or any(not one.backwards or one.reduced[-1] for one in seen):
        return ""
    one = seen[0]
    if all(rank.agreed and not rank.local for rank in seen):
        return ""  # tensor parallelism reduces what flows through the model, and gradients of shards need nothing more
    passes = f"{one.backwards} backward passes" if one.backwards > 1 else "backward pass"
    if any(one.reduced):
        last = max(index for index, done in enumerate(one.reduced) if done) + 1
        return (
            f"Cause: the no_sync boundary is off by one. At step {step}, of {passes} number {last} is reduced and the "
            f"last one, number {one.backwards}, is not: its gradient stays on its rank. Leave no_sync for the last one."
        )
    if one.local:
        ran = f"all {passes} run" if one.backwards > 1 else f"the {passes} runs"
        return (
            f"Cause: the no_sync boundary is off by one. At step {step} {ran} inside no_sync (FSDP2: after "
            "set_requires_gradient_sync(False)) and none is reduced before the optimizer steps. Synchronise in the last one."
        )
    return (
        f"Cause: gradients are not reduced. At step {step} nothing of the gradients' size is reduced between the "
        f"{passes} and the optimizer step. Wrap the model, or all-reduce its gradients."
    )


def _generators(seen: Steps, step: int) -> str:
    states = [one.dropout for one in seen]
    if len(set(states)) == 1 or not all(states):
        return ""
    first = next(rank for rank, state in enumerate(states) if state != states[0])
    return (
        f"Cause: dropout is out of step. At step {step} ranks 0 and {first} reach the first dropout layer with different "
        "states of the random generator, though seeded alike: one of them has drawn more numbers before. Draw the same "
        "on every rank, or give dropout a generator of its own."
    )


def _metric(ranks: Sequence[Steps], metric: MetricFact) -> str:
    """Weights agree at every step: only what is returned differs."""
    steps = list(zip(*ranks))
    if not steps or any(len({one.weights for one in seen}) > 1 for seen in steps):
        return ""
    lead = (
        f"Cause: {metric.name} is not synchronised. The weights are equal on all ranks at every step, so training is in "
        "step and only this quantity is each rank's own"
    )
    if metric.mean_agrees:
        return (
            f"{lead}; its mean over ranks is what one rank alone gives: all-reduce it with AVG before it is recorded."
        )
    if metric.sum_agrees:
        return f"{lead}; its sum over ranks is what one rank alone gives: all-reduce it before it is recorded."
    return f"{lead}. Reduce it before it is recorded."


def _norm(seen: Steps) -> float:
    """Norm of the whole gradient: of all shards, or of any rank's copy."""
    if any(one.gathered for one in seen):
        return float(sum(one.gradient_norm**2 for one in seen) ** 0.5)
    return seen[0].gradient_norm


def _close(seen: Steps) -> float:
    return max(CLOSE, ROUNDINGS * seen[0].roundoff)


def _exactly(seen: Steps) -> str:
    return "exactly" if _close(seen) == CLOSE else "within roundings"


def _accumulation(before: Steps, after: Steps, step: int) -> str:
    """As many times more gradient as there are more backward passes."""
    counts = before[0].backwards, after[0].backwards
    if counts[0] == counts[1] or not all(counts) or not _norm(before):
        return ""
    ratio, wanted = _norm(after) / _norm(before), counts[1] / counts[0]
    if abs(ratio - wanted) > _close(before) * wanted:
        return ""
    return (
        f"Cause: the loss is not divided by the number of accumulation steps. At step {step} the gradient is "
        f"{ratio:.6g} times that of the reference, {_exactly(before)} as {counts[1]} backward passes are to {counts[0]}. "
        "Divide the loss of each micro-batch by how many of them make a step."
    )


def _scaled(before: Steps, after: Steps, step: int, size: int) -> str:
    if not _norm(before):
        return ""
    ratio, close, exactly = _norm(after) / _norm(before), _close(before), _exactly(before)
    if size > 1 and abs(ratio - size) < close * size:
        return (
            f"Cause: gradients are summed over ranks where a mean is due. At step {step} the gradient is {exactly} {size} "
            "times that of the reference. Divide by the number of ranks."
        )
    if size > 1 and abs(ratio - 1 / size) < close / size:
        return (
            f"Cause: gradients are divided by the number of ranks once too often. At step {step} the gradient is {exactly} "
            f"1/{size} of that of the reference."
        )
    return ""


def _random(seen: Steps, step: int) -> str:
    if any(one.dropout for one in seen):
        return (
            f"Cause: dropout is out of step between world sizes. It is active at step {step}, and every rank draws masks "
            "for its own rows, other masks than one rank draws for all of them. Switch it off for this check, or draw "
            "the masks of the global batch."
        )
    if any(one.drew for one in seen):
        return (
            f"Cause: random numbers are drawn during step {step}, which cannot be the same for another share of the "
            "data. Draw them for the global batch, or from a generator that is seeded by its place in the data."
        )
    return ""
