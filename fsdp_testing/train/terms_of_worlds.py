"""Says where the first gradient that differs from the reference world goes wrong, from what backward added in both. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from fsdp_testing.cases.records.specs import UNIT_ROUNDOFF
from fsdp_testing.explain.contributions import sentence
from fsdp_testing.train.comparison import floor, part
from fsdp_testing.train.control import backward_pass, taken_apart
from fsdp_testing.train.quantities import LOSS, Kind, Quantity
from fsdp_testing.train.whole import WholeRun

_FEW = 8
"""Roundings by which the losses of both worlds may differ if they are the same loss."""


def wrong_term(reference: WholeRun, run: WholeRun, roundings: float) -> str:
    """Return, in words, the terms of the first gradient that differs from the reference world; empty if not certain.

    Args:
        reference: The reference world; its gradient is the mean of the other world's terms.
        run: The other world.
        roundings: Admissible difference, in units of roundoff times the largest number of a gradient.
    """
    for step in range(min(reference.steps, run.steps)):
        got, due, bounds = {}, {}, {}
        for key in reference.names(Kind.GRADIENT):
            values, there = reference.quantities[key], run.quantities.get(key, [])
            if step >= min(len(values), len(there)):
                continue
            bound = floor(values[step].dtype, roundings) * float(
                values[step].abs().max() if values[step].numel() else 0
            )
            one, two = values[step].double().reshape(-1), there[step].double().reshape(-1)
            if one.shape != two.shape or not bool((two - one).abs().le(bound).all()):
                got[key.name], due[key.name], bounds[key.name] = two, one, bound
        if got:
            ranks = [rank.steps[step].terms.passes for rank in run.ranks]
            terms = [one for passes in ranks for one in passes]
            if not terms or not all(
                _is_mean(due[name], [one.get(name) for one in terms], bounds[name]) for name in got
            ):
                return ""
            shares = taken_apart(got, due, ranks, bounds)
            return f"Cause: {sentence(shares, run.size, backward_pass)}, at step {step}." if shares is not None else ""
    return ""


def of_backward(reference: WholeRun, run: WholeRun, key: Quantity, step: int, roundings: float) -> str:
    """Say whether gradients of a step begin to differ in backward, or between backward and the step; empty if not certain.

    Args:
        reference: The reference world.
        run: The other world.
        key: A gradient that differs.
        step: Number of the step.
        roundings: Admissible difference, in units of roundoff times the largest number of a gradient.
    """
    unit = max((rank.steps[step].terms.roundoff for world in (reference, run) for rank in world.ranks), default=0.0)
    near = partial(_near, share=max(part(unit, roundings), floor(torch.float32, roundings)))
    due, got = _mean_terms(reference, step), _mean_terms(run, step)
    if not got or due.keys() != got.keys() or any(value.shape != due[name].shape for name, value in got.items()):
        return ""
    if all(near(value, due[name]) for name, value in got.items()):
        return (
            "It begins to differ after backward, whose mean over ranks is the gradient of one process: what the script does with "
            "gradients before the step depends on the rank or on the number of ranks (a norm, or a factor, of a rank's own "
            "shard; a reduction by hand)."
        )
    stepped, losses = run.quantities[key], [world.quantities.get(LOSS, []) for world in (reference, run)]
    reduced = key.name in got and step < len(stepped) and near(stepped[step].double().reshape(-1), got[key.name])
    if not reduced or any(step >= len(values) or not values[step].numel() for values in losses):
        return ""
    # A statistic that a rank computes alone may hardly show in the loss: losses that agree only roughly prove nothing.
    few = part(unit, _FEW) if unit <= UNIT_ROUNDOFF["float32"] else 0.0
    if not _near(losses[1][step].double().reshape(-1), losses[0][step].double().reshape(-1), share=few):
        return ""
    return (
        "It begins to differ in backward: losses are those of one process, and gradients are the mean over ranks of what "
        "backward gives. The gradient of a part of the loss is lost on its way back, or counted twice. Look for a collective in "
        "forward (no gradient passes those of torch.distributed; it does those of torch.distributed.nn.functional), an "
        "autograd.Function, a detach."
    )


def _near(one: torch.Tensor, other: torch.Tensor, *, share: float) -> bool:
    return one.shape == other.shape and bool((one - other).abs().le(share * other.abs().max()).all())


def _mean_terms(run: WholeRun, step: int) -> dict[str, torch.Tensor]:
    """The mean over ranks of the sums of their terms, by parameter; those that no rank has elements of are left out."""
    terms = [one for rank in run.ranks for one in rank.steps[step].terms.passes]
    names = dict.fromkeys(name for one in terms for name, value in one.items() if value.numel())
    sums = {name: [one[name].double().reshape(-1) for one in terms if name in one] for name in names}
    if any(one.numel() != values[0].numel() for values in sums.values() for one in values):
        return {}
    return {name: torch.stack(values).sum(0) / run.size for name, values in sums.items()}


def _is_mean(due: torch.Tensor, terms: Sequence[torch.Tensor | None], bound: float) -> bool:
    """Whether every term has the same share in the right values: else nothing follows from the shares in the actual values."""
    known = [term.double() for term in terms if term is not None]
    if len(known) < len(terms) or any(term.shape != due.shape for term in known):
        return False
    total = torch.stack(known).sum(dim=0)
    square = float(total.square().sum())
    share = float((total * due).sum()) / square if square else 0.0
    return share > 0 and bool((share * total - due).abs().le(bound).all())
