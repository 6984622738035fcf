"""Finds parts of a training without effect, on which both runs agree: zero gradients, constant weights and losses. Pure.

Zeros are equal whatever they came from. A run that trains nothing is no pass; the rest is reported beside the verdict.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp_testing.oracle.models import roundoff
from fsdp_testing.train.quantities import LOSS, RATE, Kind, Quantities, Quantity
from fsdp_testing.train.whole import WholeRun, initial

_NARROW = (torch.bfloat16, torch.float16)
_CLEAR_UNITS = 8
"""Units in the last place of the largest weight, above which an update moves it in any rounding."""


def nothing_trained(start: Quantities, run: Quantities, *, gradients_seen: bool = True) -> str:
    """Return what a run without training lacks, so that its agreement proves nothing; empty if it trained.

    Args:
        start: Parameters before the first step.
        run: The run, with the parameters after each step.
        gradients_seen: Whether the optimizer steps the tensors that have the gradients.
    """
    moved = [
        not value.equal(start[key][0])
        for key, values in run.items()
        if key in start
        for value in values
        if value.shape == start[key][0].shape
    ]
    gradients = [value for key, values in run.items() if key.kind is Kind.GRADIENT for value in values]
    zero = gradients_seen and bool(gradients) and not any(bool(gradient.any()) for gradient in gradients)
    lacking = ["no gradient other than zero"] if zero else []
    lacking += ["no parameter that changes"] if moved and not any(moved) else []
    return " and ".join(lacking)


def stands_still(run: WholeRun, steps: Sequence[int]) -> bool:
    """Whether no parameter of the models changes in any of these steps; False where there is none."""
    start = initial(run)
    for key in run.names(Kind.PARAMETER, Kind.COPIED):
        values = run.quantities[key]
        before = [start[key][0] if key in start else values[0], *values]
        if any(not torch.equal(before[step], before[step + 1]) for step in steps):
            return False
    return bool(run.names(Kind.PARAMETER, Kind.COPIED))


def still_computes_with_old(run: WholeRun) -> str:
    """Return a sentence if a model goes on with weights that were replaced by a step; otherwise empty."""
    for step, seen in enumerate(run.ranks[0].steps):
        if seen.stale:
            return (
                f"after step {step} the model goes on with old values of {len(seen.stale)} parameters, first {seen.stale[0]}. "
                "Cause: they were unsharded when the optimizer stepped their shards, and FSDP2 gathers no parameter that is "
                "unsharded. A forward without a backward (an evaluation) before the step leaves the root so: evaluate after the "
                "step, or call model.reshard() before it."
            )
    return ""


def still_though_stepped(run: WholeRun) -> str:
    """Return a sentence if no weight moves although updates are large enough to move it in any rounding; otherwise empty."""
    if RATE not in run.quantities or not stands_still(run, range(run.steps)):
        return ""
    start = initial(run)
    for key in run.names(Kind.GRADIENT):
        weight = start.get(Quantity(Kind.PARAMETER, key.name), [torch.empty(0)])[0]
        unit = roundoff(weight.dtype)
        largest = float(weight.abs().max()) if weight.numel() else torch.inf
        for step, gradient in enumerate(run.quantities[key]):
            update = float(run.quantities[RATE][step].abs().min()) * float(
                gradient.abs().max() if gradient.numel() else 0
            )
            if update > _CLEAR_UNITS * unit * largest:
                return (
                    f"no weight changes in any step, though at step {step} learning rate times gradient of {key.name} is up "
                    f"to {update:.3g}. Cause: the optimizer's updates are lost: it steps copies, or the weights are "
                    f"restored."
                )
    return ""


def idle_lines(run: WholeRun) -> list[str]:
    """Return sentences on parts without effect, and on the dtypes of weights, gradients and the optimizer's state."""
    return [
        *filter(
            None,
            [_zero_steps(run), _loss(run), _unreached(run), _unmoved(run), _rates(run), _schedules(run), _clips(run)],
        ),
        *filter(None, [_hooks(run)]),
        *_dtypes(run),
    ]


def _zero_steps(run: WholeRun) -> str:
    gradients = [run.quantities[key] for key in run.names(Kind.GRADIENT)]
    filled = [any(bool(values[step].any()) for values in gradients if step < len(values)) for step in range(run.steps)]
    steps = [str(step) for step, any_ in enumerate(filled) if not any_]
    return f"nothing: the gradient is zero at step {', '.join(steps)}" if gradients and steps else ""


def _loss(run: WholeRun) -> str:
    losses = run.quantities.get(LOSS, [])
    same = len(losses) > 1 and all(torch.equal(loss, losses[0]) for loss in losses)
    return f"nothing: the loss does not change, it is {float(losses[0].sum()):.6g} at each step" if same else ""


def _unreached(run: WholeRun) -> str:
    keys = run.names(Kind.GRADIENT)
    without = [key.name for key in keys if not any(bool(value.any()) for value in run.quantities[key])]
    if not without:
        return ""
    return f"nothing: no gradient other than zero reaches {len(without)} of {len(keys)} parameters, first {without[0]}"


def _unmoved(run: WholeRun) -> str:
    """A sentence on parameters that no step changes, though a gradient reaches them and others change."""
    start, keys = initial(run), run.names(Kind.PARAMETER)
    still = [key for key in keys if key in start and all(torch.equal(start[key][0], v) for v in run.quantities[key])]
    reached = {key.name for key in run.names(Kind.GRADIENT) if any(bool(v.any()) for v in run.quantities[key])}
    names = [key.name for key in still if key.name in reached and start[key][0].dtype not in _NARROW]
    if not names or len(still) == len(keys):
        return ""
    return f"nothing: no step changes {len(names)} of {len(keys)} parameters, first {names[0]}, though a gradient reaches them"


def _rates(run: WholeRun) -> str:
    """A sentence on groups that were made with rates of their own and all step by one rate."""
    made = next((seen.made_rates for seen in run.seen), ())
    rates = [run.quantities[RATE][step] for step in range(run.steps)] if RATE in run.quantities else []
    if (
        len({*made}) < 2
        or any(rate.numel() != len(made) or bool((rate != rate[0]).any()) for rate in rates)
        or not rates
    ):
        return ""
    listed = ", ".join(f"{rate:.6g}" for rate in made)
    return f"nothing: groups were made with learning rates {listed}, and at each step all have the same"


def _schedules(run: WholeRun) -> str:
    """A sentence on schedules that several steps do not step; one that goes by epochs may need more steps."""
    idle = run.ranks[0].steps[-1].idle_schedules if run.steps > 1 else ()
    if not idle:
        return ""
    return f"nothing: the learning rate's schedule ({', '.join(idle)}) was made and is not stepped in these {run.steps} steps"


def _hooks(run: WholeRun) -> str:
    """A sentence on hooks that ran on no rank; a rank without an element of a parameter may run none."""
    of_ranks = [rank.steps[-1].idle_hooks if rank.steps else () for rank in run.ranks]
    idle = [place for place in of_ranks[0] if all(place in places for places in of_ranks)]
    if not idle:
        return ""
    return (
        f"nothing: {len(idle)} hook(s) on parameters never ran, the first registered at {idle[0]}; wrapping may have put other "
        "parameters in their places"
    )


def _clips(run: WholeRun) -> str:
    pairs = [pair for seen in run.seen for pair in zip(seen.norms, seen.clip_limits)]
    if not pairs or any(norm > limit for norm, limit in pairs):
        return ""
    largest, limit = max(pairs)
    return f"nothing: clip_grad_norm_ clips at no step, norms are at most {largest:.4g} and its limit is {limit:.4g}"


def _dtypes(run: WholeRun) -> list[str]:
    words = {Kind.PARAMETER: "weights", Kind.GRADIENT: "gradients", Kind.MOMENT: "the optimizer's state"}
    dtypes = {
        kind: sorted(
            {
                str(value.dtype).removeprefix("torch.")
                for key in run.names(kind)
                for value in run.quantities[key]
                if value.ndim
            }
        )
        for kind in words
    }
    listed = [f"{words[kind]} {' and '.join(names)}" for kind, names in dtypes.items() if names]
    lines = [f"dtypes as the optimizer steps: {', '.join(listed)}"] if listed else []
    narrow = [n for n in dtypes[Kind.PARAMETER] if getattr(torch, n) in _NARROW]
    if narrow and not any(seen.strange for seen in run.seen):
        lines.append(
            f"warning: weights are stepped in {narrow[0]}, without a copy in float32: a change of less than "
            f"{'1/256' if narrow[0] == 'bfloat16' else '1/2048'} of a weight is lost"
        )
    return lines
