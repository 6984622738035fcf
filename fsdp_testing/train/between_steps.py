"""Weights between the steps: changed outside of the optimizer, or stepped apart and averaged, as local SGD does. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from fsdp_testing.judging.checkers.divergence import DECISIVE
from fsdp_testing.train.on_rank import RankReport
from fsdp_testing.train.quantities import Kind, Quantity, QuantitySpans
from fsdp_testing.train.spans import assembled
from fsdp_testing.train.steps import StepSeen

_BY_DESIGN = (
    "each rank steps its own gradient, and weights are averaged over ranks (local SGD, FedAvg, DiLoCo, PostLocalSGDOptimizer). "
    "By design this differs from one process, unless it is done after each step of SGD without a clip. Average gradients "
    "instead, or judge it by its loss alone."
)
REMARK = (
    "weights are averaged over ranks after each step, and compared then; not compared: gradients and the optimizer's state, each "
    "rank's own"
)
OF_EACH_STEP = f"Cause: {_BY_DESIGN}"
_NEAR = 1e-5
"""Relative to the largest number; a mean has a few roundings."""


def are_averaged(ranks: Sequence[RankReport]) -> bool:
    """Whether weights that differ between ranks are replaced by their mean after each step."""
    for at, seen in enumerate(zip(*(rank.steps for rank in ranks))):
        later = [_following(rank)[at] for rank in ranks]
        for key in [key for key in seen[0].after if key.kind is Kind.PARAMETER]:
            if _apart(key, [one.after for one in seen]) and not _is_mean(key, [one.after for one in seen], later):
                return False
    return True


def with_averages(ranks: Sequence[RankReport]) -> list[RankReport]:
    """Return the reports with weights as they are when the next forward begins, and without each rank's own optimizer state."""
    return [
        replace(rank, steps=tuple(_settled(seen, later) for seen, later in zip(rank.steps, _following(rank))))
        for rank in ranks
    ]


def of_disagreement(ranks: Sequence[RankReport], step: int, key: Quantity) -> str:
    """Return the cause if ranks hold different values of a parameter after a step, and their mean before a later one."""
    if key.kind is not Kind.PARAMETER:
        return ""
    for at, seen in enumerate(zip(*(rank.steps for rank in ranks))):
        after, later = [one.after for one in seen], [_following(rank)[at] for rank in ranks]
        if at < step:
            continue
        if _apart(key, after) and _is_mean(key, after, later):
            return f"Cause: {_BY_DESIGN} Ranks have the same weights again after step {at}."
        # What makes them the same may be an optimizer of its own, whose step counts with this one.
        if at > step and not _apart(key, after):
            return f"Cause: {_BY_DESIGN} Ranks have the same weights again in step {at}."
    return ""


def _following(rank: RankReport) -> list[QuantitySpans]:
    """Return, for each step, the parameters that changed between it and the next."""
    return [*(seen.before for seen in rank.steps[1:]), rank.settled]


def _apart(key: Quantity, held: Sequence[QuantitySpans]) -> bool:
    return assembled([of_rank.get(key, ()) for of_rank in held])[1] is not None


def _is_mean(key: Quantity, after: Sequence[QuantitySpans], later: Sequence[QuantitySpans]) -> bool:
    """Whether all ranks have the mean of what they had after a step."""
    if not all(key in of_rank for of_rank in (*after, *later)) or _apart(key, later):
        return False
    mean = torch.stack([assembled([of_rank[key]])[0].double() for of_rank in after]).mean(0)
    value = assembled([later[0][key]])[0].double()
    return bool(((value - mean).abs() <= _NEAR * mean.abs().max()).all())


def _settled(seen: StepSeen, later: QuantitySpans) -> StepSeen:
    after = {
        key: later.get(key, spans) if key.kind is Kind.PARAMETER else spans
        for key, spans in seen.after.items()
        if key.kind is not Kind.MOMENT
    }
    return replace(seen, after=after)


def of_own_gradients(apart: Collection[Kind]) -> str:
    """Return the cause if ranks have gradients of their own before each step, and the same weights after it.

    Args:
        apart: The kinds of quantities that differ between ranks.
    """
    if Kind.GRADIENT not in apart or Kind.PARAMETER in apart:
        return ""
    return (
        "Cause: ranks have gradients of their own before the optimizer's step and the same weights after it, so the optimizer "
        "reduces in its step. Look there for what it makes of a rank's own gradient (a second moment, a norm, a sign), and for "
        "elements that no rank steps."
    )


def of_moves(reference: Sequence[RankReport], run: Sequence[RankReport], step: int) -> str:
    """Return the cause if weights changed since the step before, and differ from those of one process."""
    if not step:
        return ""
    ranks = (*run, *reference)
    for key in {key: None for rank in ranks for key in rank.steps[step].before}:
        if any(key not in rank.steps[step - 1].after for rank in ranks):
            continue  # of a model that is new in this step
        here, there = (_move(world, step, key) for world in (run, reference))
        largest = max(float(move.abs().max()) if move.numel() else 0.0 for move in (here, there))
        if here.shape != there.shape or bool(((here - there).abs() > DECISIVE * largest).any()):
            return (
                f"Cause: after step {step - 1} weights agree, and before step {step} they are changed outside of the optimizer's "
                f"step, first {key.name}, differently from one process: weights that are decayed twice, clamped or "
                "averaged by numbers that depend on the number of ranks."
            )
    return ""


def _move(ranks: Sequence[RankReport], step: int, key: Quantity) -> torch.Tensor:
    """Return, in float64, how a parameter changed between the end of the step before and a step."""
    after = [rank.steps[step - 1].after[key] for rank in ranks]
    before = [rank.steps[step].before.get(key, spans) for rank, spans in zip(ranks, after)]
    return assembled(before)[0].double() - assembled(after)[0].double()
