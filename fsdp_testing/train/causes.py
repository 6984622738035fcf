"""Finds why a world trains differently from the reference world, or its ranks from one another. Pure.

The one table of causes: `of_difference`, `of_disagreement` and `wrong_in_itself` try them in order. They name only what was seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest

import torch

from fsdp_testing.train import between_steps, evidence, multiples
from fsdp_testing.train.comparison import CLEAR_ROUNDINGS, Difference, floor, suggestion
from fsdp_testing.train.control import control
from fsdp_testing.train.conventions import BATCH_NORM, MEASURED, SCHEDULER, flag
from fsdp_testing.train.idle import stands_still, still_computes_with_old, still_though_stepped
from fsdp_testing.train.quantities import LOSS, RATE, Kind
from fsdp_testing.train.spans import assembled
from fsdp_testing.train.terms_of_worlds import of_backward, of_own_changes, wrong_term
from fsdp_testing.train.whole import Disagreement, WholeRun, first_steps


def wrong_in_itself(run: WholeRun, accept: Sequence[str]) -> str:
    """Return what is wrong with any number of ranks, so that no comparison shows it; empty if nothing is.

    No weight of the model changes though backward passes ran, gradients wait to be reduced, an order of data is repeated.
    """
    return (
        _strange_optimizer(run)
        or _no_gradient(run)
        or still_computes_with_old(run)
        or _unreduced(run)
        or _order(run)
        or still_though_stepped(run)
        or control(run, measures=MEASURED in accept).wrong
    )


def of_same_rows(run: WholeRun, times: int) -> str:
    """Return the sentence on ranks that repeat each other's work."""
    alike: dict[tuple[tuple[str, ...], ...], list[int]] = {}
    for rank in range(run.size):
        alike.setdefault(tuple(step[rank] for step in run.rows), []).append(rank)
    same = f"the same rows at every step ({len(run.rows[0][0])} at step 0): each is seen {times} times"
    if len(alike) == 1:
        return (
            f"every rank trains on {same}. Cause: the data are not divided among the ranks. Give the DataLoader a "
            "DistributedSampler, or take each rank's slice."
        )
    groups = ", and ".join(f"ranks {_listed(ranks)}" for ranks in alike.values() if len(ranks) > 1)
    return (
        f"{groups} train on {same}. Cause: the data are divided among {len(alike)} of {run.size} ranks, as by a sampler with "
        "the rank and the number of one dimension of a mesh. Ranks that shard a model and ranks that replicate it all take rows "
        "of their own: use those of both."
    )


def _strange_optimizer(run: WholeRun) -> str:
    for seen in first_steps(run):
        if seen.strange and seen.strange == seen.stepped and stands_still(run, range(run.steps)):
            return (
                f"the optimizer steps {seen.stepped} tensors, none of which belongs to the model that was run, and no "
                "weight of the model changes. Cause: the optimizer was made before the model was wrapped (or converted), which "
                "replaced its parameters. Make it after."
            )
    return ""


def _no_gradient(run: WholeRun) -> str:
    for step in range(run.steps):
        seen = [rank.steps[step] for rank in run.ranks]
        unseen = not any(one.given for one in seen) and any(one.losses for one in seen)
        if unseen and stands_still(run, [step]):
            return (
                f"no parameter has a gradient when the optimizer steps at step {step}, though {len(seen[0].losses)} backward "
                "passes ran on each rank. Cause: the no_sync boundary is off by one, so that gradients are kept unreduced, or "
                "they were cleared before the step. Synchronise in the last micro-batch, and clear after the step."
            )
    return ""


def _unreduced(run: WholeRun) -> str:
    for rank in run.ranks:
        for step, seen in enumerate(rank.steps):
            if seen.unreduced:
                return (
                    f"{len(seen.unreduced)} gradients, first that of {seen.unreduced[0]}, are not reduced when the optimizer "
                    f"steps at step {step}. Cause: the no_sync boundary is off by one. Leave no_sync for the last micro-batch."
                )
    return ""


def _order(run: WholeRun) -> str:
    how = next(
        (loader.repeats_order for rank in run.ranks for loader in rank.taken.loaders if loader.repeats_order), ""
    )
    return how and (
        "a pass over a DataLoader takes the rows in the same order as the pass before. Cause: its DistributedSampler "
        f"shuffles by epoch, and set_epoch {how}. Call sampler.set_epoch(epoch) with the number of the epoch before each pass."
    )


def of_disagreement(run: WholeRun, odd: Disagreement) -> str:
    """Return why ranks hold different values of a shared quantity."""
    if odd.kind is Kind.BUFFER:
        return (
            _batch_norm(run, odd.step) or "Each rank computes its own: reduce it, or leave it out of the model's state."
        )
    if odd.kind is Kind.COPIED:
        return (
            "Cause: the optimizer steps copies of the parameters, and the copy is not written back on every rank, or "
            "not in the same way. Copy after each step, on all ranks."
        )
    by_evidence = evidence.between_ranks(run.evidence)
    reduced = all(all(rank.steps[odd.step].evidence.reduced[-1:]) for rank in run.ranks)
    return (
        between_steps.of_disagreement(run.ranks, odd.step, odd.quantity)
        or _not_sent(run, odd)
        or _skipped(run, odd)
        or _own_settings(run, odd.step)
        or _moved_apart(run, odd)
        or (_local_norm(run, odd.step) if reduced else "")
        or of_own_changes(run, odd, CLEAR_ROUNDINGS)
        or multiples.of_unreduced(run, odd)
        or by_evidence
        or multiples.of_updates(run, odd)
        or multiples.of_own_number(run, odd)
        or "Each rank changes its own copy: look for a gradient that is not reduced, or a step that one rank skips."
    )


def of_returned(run: WholeRun, reference: WholeRun, difference: Difference) -> str:
    """Return why a rank returns a different number from rank 0."""
    name, step = difference.quantity.name, difference.step

    def agrees(scale: float) -> bool:
        wanted = reference.ranks[0].returned.get(name, [])
        given = [rank.returned.get(name, []) for rank in run.ranks]
        if run.size == reference.size or len(wanted) <= step or any(len(steps) <= step for steps in given):
            return False
        due, others = wanted[step].double(), [steps[step].double() for steps in given]
        if any(other.shape != due.shape for other in others):
            return False
        return torch.allclose(torch.stack(others).sum(dim=0) * scale, due, rtol=1e-6, atol=0.0)

    reduced = "mean" if agrees(1.0 / run.size) else "sum" if agrees(1.0) else ""
    return evidence.between_ranks(run.evidence, name, reduced) or (
        "Ranks that compute the same must return the same: look for a metric or gradient that is not reduced, a seed that "
        "depends on the rank, or dropout that is out of step."
    )


def _receivers(run: WholeRun, step: int) -> list[int]:
    """Return the ranks that step no optimizer but receive weights."""
    return [number for number, rank in enumerate(run.ranks) if not rank.steps[step].settings]


def _not_sent(run: WholeRun, odd: Disagreement) -> str:
    receivers = _receivers(run, odd.step) if odd.kind is Kind.PARAMETER else []
    if not receivers:
        return ""
    return (
        f"Cause: rank(s) {_listed(receivers)} step no optimizer, and are not sent this parameter as another rank has stepped it. "
        "Broadcast every parameter after the step."
    )


def _skipped(run: WholeRun, odd: Disagreement) -> str:
    seen = [rank.steps[odd.step] for rank in run.ranks]
    passes, stepped = [len(one.losses) for one in seen], [one.stepped for one in seen]
    if odd.kind is Kind.PARAMETER and len(set(passes)) > 1:
        return (
            f"The ranks made {_listed(passes)} backward passes for it. Cause: a rank decides by its own number to skip a "
            f"step (a loss or norm that is not reduced). Decide by a number that is equal on all ranks."
        )
    if odd.kind is Kind.PARAMETER and len(set(stepped)) > 1 and not run.shares_work:
        return (
            f"Cause: the ranks step {_listed(stepped)} tensors. A rank does not step one of its optimizers, or has given it "
            "others. Step the same on every rank."
        )
    return ""


def _moved_apart(run: WholeRun, odd: Disagreement) -> str:
    """Return the cause if ranks have the same weights after a step, but different ones before the next."""
    key, step = odd.quantity, odd.step
    after = [rank.steps[step - 1].after.get(key, ()) for rank in run.ranks] if step > 0 else []
    before = [rank.steps[step].before.get(key, spans) for rank, spans in zip(run.ranks, after)]
    if odd.kind is not Kind.PARAMETER or not (after and all(after)) or assembled(before)[1] is None:
        return ""
    return (
        f"Cause: after step {step - 1} ranks have the same weights, and before step {step} they are changed outside of the "
        "optimizer's step, differently on ranks. Change them on every rank in the same way."
    )


def _own_settings(run: WholeRun, step: int) -> str:
    """Return the cause if ranks set their optimizers to different numbers."""
    first, *others = [rank.steps[step].settings for rank in run.ranks]
    for rank, settings in enumerate(others, start=1):
        for name in (name for name in first if len(settings.get(name, ())) == len(first[name])):
            for here, there in zip(first[name], settings[name]):
                if here != there:
                    return (
                        f"Cause: at step {step} the optimizer's {name} is {here:.6g} on rank 0 and {there:.6g} on rank {rank}. "
                        "Set it on every rank, by a number that is the same on all (all-reduce a loss that a schedule follows)."
                    )
    return ""


def _local_norm(run: WholeRun, step: int) -> str:
    norms = [rank.steps[step].norms for rank in run.ranks]
    if len(set(norms)) == 1 or _receivers(run, step):
        return ""
    if not all(norms):
        clips = [rank for rank, given in enumerate(norms) if given]
        return f"Cause: at step {step} only rank(s) {_listed(clips)} clip the gradient. Clip on every rank, or on none."
    first = next(rank for rank, norm in enumerate(norms) if norm != norms[0])
    here, there = next(pair for pair in zip_longest(norms[0], norms[first], fillvalue=math.nan) if pair[0] != pair[1])
    return (
        f"Cause: gradients are clipped on a local norm. At step {step} clip_grad_norm_ gives {here:.6g} on rank 0 and "
        f"{there:.6g} on rank {first}. Clip after the reduction, by the norm of the whole gradient."
    )


def _clip_limit(reference: WholeRun, run: WholeRun, step: int) -> str:
    due, got = (world.ranks[0].steps[step].clip_limits for world in (reference, run))
    pair = next((pair for pair in zip(due, got) if pair[0] != pair[1]), None)
    if pair is None:
        return ""
    return (
        f"Cause: gradients are clipped to {pair[1]:.6g}, and in one process to {pair[0]:.6g}: the limit depends on the number of "
        "ranks. The norm is that of the whole gradient: clip it to the same number."
    )


def of_difference(reference: WholeRun, run: WholeRun, difference: Difference) -> str:
    """Return why a world differs from the reference world."""
    step = min(difference.step, run.steps - 1)  # returned quantities may count other steps than the optimizer's
    apart = {odd.kind for odd in run.disagreements}
    in_step = between_steps.of_own_gradients(apart)
    return (
        (between_steps.OF_EACH_STEP if run.averaged else "")
        or _by_design(run, difference)
        or evidence.of_rate(
            difference,
            run.size,
            begins=_begins(reference, difference),
            regrouped=len({world.quantities[RATE][0].numel() for world in (reference, run) if RATE in world.quantities})
            > 1,
        )
        or _kept(reference, run, difference)
        or (step >= 0 and _of_step(reference, run, step))
        or ("" if run.shares_work else evidence.between_sizes(reference.evidence, run.evidence, run.size, in_step))
        # What such an optimizer is given are no gradients of the world.
        or (in_step if difference.quantity.kind in (Kind.PARAMETER, Kind.MOMENT) else "")
        or wrong_term(reference, run, CLEAR_ROUNDINGS)
        or (step >= 0 and multiples.of_gradients(reference, run, step))
        or multiples.of_change(reference, run, difference)
        or _of_buffers(reference, run, difference)
        or _of_forward(reference, run, difference)
        or _loss(difference)
        or _of_backward(reference, run, difference)
        or suggestion(difference, run.size)
    )


def _of_backward(reference: WholeRun, run: WholeRun, difference: Difference) -> str:
    if difference.quantity.kind not in (Kind.GRADIENT, Kind.UNCLIPPED) or run.shares_work:
        return ""
    return of_backward(reference, run, difference.quantity, difference.step, CLEAR_ROUNDINGS)


def _of_forward(reference: WholeRun, run: WholeRun, difference: Difference) -> str:
    """Say that forward differs already, where ranks share its work."""
    step = difference.step
    losses = [world.quantities.get(LOSS, [])[step : step + 1] for world in (reference, run)]
    if (
        not run.shares_work
        or difference.quantity.kind not in (Kind.UNCLIPPED, Kind.GRADIENT, Kind.LOSS)
        or not all(losses)
    ):
        return ""
    due, got = (float(one[0].double().sum()) for one in losses)
    if abs(got - due) <= floor(losses[0][0].dtype, CLEAR_ROUNDINGS) * abs(due):
        return ""
    return (
        f"Weights and rows are those of one process, and the loss at this step is not: {got:.6g}, expected {due:.6g}. So forward "
        "differs, whose work the ranks share. Look for what each adds before a sum over ranks (the bias of a row-parallel "
        "layer, a residual), or for a sum that is missing."
    )


def _of_step(reference: WholeRun, run: WholeRun, step: int) -> str:
    return (
        between_steps.of_moves(reference.ranks, run.ranks, step)
        or ("" if run.shares_work else _own_settings(run, step))
        or _local_norm(run, step)
        or _clip_limit(reference, run, step)
        or multiples.other_groups(reference, run, step)
        or multiples.of_own_counts(reference, run, step)
        or ("" if multiples.of_gradients(reference, run, step) else _counts(run, step))
        or _batch_norm(run, step)
    )


def _begins(reference: WholeRun, difference: Difference) -> bool:
    """Whether all rates before a difference are zero, as at the start of a warm-up."""
    before = reference.quantities.get(RATE, [])[: difference.step]
    return not any(bool(rates.any()) for rates in before)


def _by_design(run: WholeRun, difference: Difference) -> str:
    if difference.quantity.kind is not Kind.RATE or SCHEDULER not in run.ranks[0].conventions:
        return ""
    return (
        "Cause: Accelerate's scheduler steps once for each process by design (AcceleratedScheduler without split_batches), "
        f"so that the learning rate depends on their number. {flag(SCHEDULER)}"
    )


def _kept(reference: WholeRun, run: WholeRun, difference: Difference) -> str:
    """Return the cause if only values other than weights and gradients differ: in a step those two come first."""
    kind, name = difference.quantity.kind, difference.quantity.name
    if kind is Kind.COPIED:
        return "Cause: the optimizer steps copies of the parameters, and writes back other values than those that it stepped."
    if kind is Kind.SETTING:
        return f"Cause: the optimizer's {name} depends on the number of ranks."
    if kind is Kind.COPY:
        return (
            "Cause: weights agree at each step and this copy of them does not: its decay, or how often it is updated, depends on "
            "the number of ranks."
        )
    if kind is Kind.MOMENT and multiples.has_due_gradient(reference, run, name, difference.step):
        # Weights that are off by less than their bound may put the state over its own.
        moved = between_steps.of_moves(reference.ranks, run.ranks, difference.step)
        return (
            moved or "Cause: gradients and weights agree so far: the optimizer's state is changed outside of its step."
        )
    return ""


def _counts(run: WholeRun, step: int) -> str:
    counts = [len(rank) for rank in run.rows[step]]
    if len(set(counts)) == 1 or run.shares_work:
        return ""
    return (
        f"Cause: an uneven batch. At step {step} the ranks have {_listed(counts)} rows, and the mean of their means is not "
        "the mean of all rows. Drop or pad the last batch, or weight each rank's loss by its rows."
    )


def _batch_norm(run: WholeRun, step: int) -> str:
    if not run.ranks[0].steps[step].batch_norm:
        return ""
    return (
        "Cause: BatchNorm normalises the rows of each rank alone: each rank's own statistic, by design or by mistake. Use "
        f"SyncBatchNorm, or another normalisation; otherwise N ranks are not one process. {flag(BATCH_NORM)}"
    )


def _of_buffers(reference: WholeRun, run: WholeRun, difference: Difference) -> str:
    """Name a buffer that differs where weights before the step agree: what it adds to forward differs, too."""
    if difference.quantity.kind not in (Kind.LOSS, Kind.UNCLIPPED, Kind.GRADIENT):
        return ""
    step = difference.step
    for key in reference.names(Kind.BUFFER):
        due, got = (world.quantities.get(key, [])[step : step + 1] for world in (reference, run))
        if not (due and got and due[0].numel() and due[0].shape == got[0].shape and due[0].is_floating_point()):
            continue
        bound = floor(due[0].dtype, CLEAR_ROUNDINGS) * float(due[0].abs().max())
        here = multiples.multiple_of(got[0], due[0], bound)
        if not here.same:
            how = f"is {here.times:.6g} times that" if here.times is not None else "is not that"
            return (
                f"At this step {key} {how} of one process, too. Look first at what the script keeps there: a statistic of each "
                "rank's own rows, a sum over ranks, or a step scaled by their number."
            )
    return ""


def _loss(difference: Difference) -> str:
    if difference.quantity.kind is not Kind.LOSS:
        return ""
    return (
        "Weights and rows equal those of one process, but the mean of the ranks' losses is not its loss. Look for a loss that is "
        "divided by the rank's own count (of tokens, of weights), scaled by the number of ranks or micro-batches, or made of "
        "something else that differs between ranks (labels, a teacher)."
    )


def _listed(numbers: Sequence[float]) -> str:
    return ", ".join(map(str, numbers))
