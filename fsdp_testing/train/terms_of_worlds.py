"""Says where the first gradient that differs from the reference world goes wrong, from what backward added in both. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from fsdp_testing.cases.records.specs import UNIT_ROUNDOFF
from fsdp_testing.explain.contributions import sentence
from fsdp_testing.train.comparison import floor, part
from fsdp_testing.train.control import backward_pass, taken_apart
from fsdp_testing.train.multiples import UNEVEN, weights_of
from fsdp_testing.train.quantities import LOSS, Kind, Quantity
from fsdp_testing.train.spans import assembled
from fsdp_testing.train.terms import summed_terms
from fsdp_testing.train.whole import Disagreement, WholeRun

_FEW = 8
"""Roundings by which the losses of both worlds may differ if they are the same loss."""


AFTER_BACKWARD = "It begins to differ after backward"
"""Then it is no statistic of a rank's rows in forward, or in the loss."""


@dataclass(frozen=True, slots=True)
class _Wrong:
    """The first gradients that differ from the reference world.

    Attributes:
        step: Their step.
        got, due: Of both worlds, by parameter, each in one row.
        bounds: How far each may be off.
        ranks: What backward added, by rank and pass.
    """

    step: int
    got: dict[str, torch.Tensor]
    due: dict[str, torch.Tensor]
    bounds: dict[str, float]
    ranks: list[Sequence[Mapping[str, torch.Tensor]]]

    @property
    def terms_are_right(self) -> bool:
        """Whether what backward added is right: the gradients of the reference world are its mean."""
        terms = [one for passes in self.ranks for one in passes]
        return bool(terms) and all(
            _is_mean(due, [one.get(name) for one in terms], self.bounds[name]) for name, due in self.due.items()
        )


def _first_wrong(reference: WholeRun, run: WholeRun, roundings: float) -> _Wrong | None:
    for step in range(min(reference.steps, run.steps)):
        wrong = _Wrong(step, {}, {}, {}, [rank.steps[step].terms.passes for rank in run.ranks])
        for key in reference.names(Kind.GRADIENT):
            values, there = reference.quantities[key], run.quantities.get(key, [])
            if step >= min(len(values), len(there)):
                continue
            bound = floor(values[step].dtype, roundings) * float(
                values[step].abs().max() if values[step].numel() else 0
            )
            one, two = values[step].double().reshape(-1), there[step].double().reshape(-1)
            if one.shape != two.shape or not bool((two - one).abs().le(bound).all()):
                wrong.got[key.name], wrong.due[key.name], wrong.bounds[key.name] = two, one, bound
        if wrong.got:
            return wrong
    return None


def wrong_term(reference: WholeRun, run: WholeRun, roundings: float) -> str:
    """Return, in words, the terms of the first gradient that differs from the reference world; empty if not certain.

    Args:
        reference: The reference world; its gradient is the mean of the other world's terms.
        run: The other world.
        roundings: Admissible difference, in units of roundoff times the largest number of a gradient.
    """
    wrong = _first_wrong(reference, run, roundings)
    if wrong is None or not wrong.terms_are_right:
        return ""
    shares = taken_apart(wrong.got, wrong.due, wrong.ranks, wrong.bounds)
    if shares is not None:
        return f"Cause: {sentence(shares, run.size, backward_pass)}, at step {wrong.step}."
    return _of_weights(wrong, run.size)


def _of_weights(wrong: _Wrong, size: int) -> str:
    """Return the cause where the first wrong gradient adds up the ranks' gradients with unequal weights; else empty."""
    name, got = next(iter(wrong.got.items()))
    rows = [row.double() for passes in wrong.ranks if (row := summed_terms(passes).get(name)) is not None]
    alone = [rank for rank, row in enumerate(rows) if bool((row - got).abs().le(wrong.bounds[name]).all())]
    if len(alone) == 1:
        return (
            f"Cause: at step {wrong.step} the gradient of {name} is that of rank {alone[0]} alone, not the mean over ranks. "
            "All-reduce it; a broadcast or a reduction to one rank drops the others."
        )
    weights = weights_of(got, rows, wrong.bounds[name]) if got.numel() > size else None
    if weights is None or max(weights) - min(weights) < UNEVEN:
        return ""
    ranks = " + ".join(f"{weight:.4g} x rank {rank}'s" for rank, weight in enumerate(weights))
    return (
        f"Cause: at step {wrong.step} the gradient of {name} is {ranks}, expected equal weights: what backward gives is "
        "right, and each rank scales its own before the reduction. Look for a clip by the norm of a rank's own gradient, or a "
        "count of its own, in a hook or between backward and the step."
    )


def of_own_changes(run: WholeRun, odd: Disagreement, roundings: float) -> str:
    """Return the cause if ranks have the same gradient, of backward or reduced, and each steps one that it made of it.

    A gradient that is not reduced is a multiple of the rank's own; one that some ranks reduce has shares of theirs.
    """
    if odd.kind is not Kind.PARAMETER:
        return ""
    seen = [rank.steps[odd.step] for rank in run.ranks]
    stepped, terms = [one.of(Kind.GRADIENT) for one in seen], [summed_terms(one.terms.passes) for one in seen]
    # Ranks that work together on rows mix them in backward already.
    reduced = not run.shares_work and all(all(one.evidence.reduced[-1:]) for one in seen)
    for name in stepped[0]:
        spans = [one.get(name, ()) for one in stepped]
        if assembled(spans)[1] is None or not all(name in one for one in terms):
            continue
        got = [assembled([held])[0].double().reshape(-1) for held in spans]
        own = [one[name].double().reshape(-1) for one in terms]
        if any(one.shape != own[0].shape for one in (*got, *own)) or len(own[0]) <= 2 * run.size:
            continue
        bound = floor(torch.float32, roundings) * max(float(one.abs().max()) for one in (*got, *own))
        how = _changed(got, own, bound, reduced=reduced)
        if not how:
            return ""
        return (
            f"Cause: {how}, and then each rank steps another one: at step {odd.step} first that of {name} differs. Look "
            "between backward and the step for a norm or a factor of a rank's own, a statistic of its rows, or noise that it "
            "draws: reduce it, or draw it from one seed."
        )
    return ""


def _changed(got: Sequence[torch.Tensor], own: Sequence[torch.Tensor], bound: float, *, reduced: bool) -> str:
    """Return which gradient ranks have in common before each changes it; empty if none, or if that is not certain."""
    if all(bool((one - own[0]).abs().le(bound).all()) for one in own):
        return "backward gives all ranks the same gradient"
    singular = torch.linalg.svdvals(torch.stack([*own], 1))
    if not reduced or not bool(singular[-1] > UNEVEN * singular[0]):
        return ""
    shares = [weights_of(one, own, bound) for one in got]
    equal = [share is None or max(share) - min(share) < UNEVEN * max(map(abs, share)) for share in shares]
    return "gradients are reduced" if all(equal) else ""


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
    if all(near(value, due[name]) for name, value in got.items()) and not _explains(
        due, got, (reference, run), key, step
    ):
        return (
            f"{AFTER_BACKWARD}, whose mean over ranks is the gradient of one process: what the script does with gradients "
            "before the step depends on the rank or on the number of ranks (a clip of a rank's own gradient before the "
            "reduction; a norm, or a factor, of a rank's own shard; a reduction by hand)."
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
        "forward (no gradient passes those of torch.distributed; all_gather of torch.distributed.nn.functional, on gloo, gives a "
        "wrong one where the gradient is not contiguous), an autograd.Function, a detach."
    )


def _explains(
    due: Mapping[str, torch.Tensor],
    got: Mapping[str, torch.Tensor],
    worlds: tuple[WholeRun, WholeRun],
    key: Quantity,
    step: int,
) -> bool:
    """Whether what backward gave already differs by a good part of what the stepped gradients differ by."""
    stepped = [world.quantities[key][step].double() for world in worlds if step < len(world.quantities.get(key, ()))]
    if key.name not in got or len(stepped) < len(worlds) or stepped[0].shape != stepped[1].shape:
        return False
    apart = float((stepped[1] - stepped[0]).abs().max())
    return float((got[key.name] - due[key.name]).abs().max()) > apart / 4


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
