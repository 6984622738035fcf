"""Finds the multiple by which a step is wrong: gradients by parameter, changes of parameters, gradients of each rank. Pure.

A cause is named only if the multiple gives the wrong numbers, and everything else in the step agrees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from fsdp_testing.train.comparison import CLEAR_ROUNDINGS, ROUNDINGS, Difference, floor, part
from fsdp_testing.train.conventions import LOSS, flag
from fsdp_testing.train.quantities import Kind, Quantity
from fsdp_testing.train.spans import assembled
from fsdp_testing.train.terms import summed_terms
from fsdp_testing.train.whole import Disagreement, WholeRun, first_steps, initial

_SAME = 1e-5
"""Relative; multiples that are nearer are one."""
_SIMPLE = 12
"""Denominators of numbers of ranks and micro-batches."""
_PADDED = 1 / 16
"""Parts of all elements; padding of shards may change a group's share by as much in a small model."""
UNEVEN = 1e-3
"""Weights of ranks that differ by less, or gradients of ranks that are so nearly multiples of one another, say nothing."""
_OWN = (
    "Cause: each rank's own statistic, by design or by mistake: the loss over the rows of a rank is not a mean over "
    "rows, so the mean of the ranks' losses is not the loss of all rows: a router's balance, a contrastive loss, or "
    "a count or norm of its own"
)
OWN_IN_FORWARD = (
    f"{_OWN}, within forward. One process that gets the rows of each rank separately does the same. Compute that "
    f"term over the rows of all ranks. {flag(LOSS)}"
)
_OWN_OUTSIDE = (
    f"{_OWN}, outside of the model's forward. At step 0 the mean of what one process computes from each rank's rows{{}} is the "
    "gradient that the ranks step. Compute that term over the rows of all ranks. If it is intended, compute it "
    f"within forward and add `--accept {LOSS}`."
)


@dataclass(frozen=True, slots=True)
class Multiple:
    """Numbers beside the expected ones.

    Attributes:
        times: The multiple of the expected numbers that they are; None if they are no multiple.
        same: Whether they are equal but for roundings.
    """

    times: float | None
    same: bool


def multiple_of(got: torch.Tensor, due: torch.Tensor, bound: float) -> Multiple:
    """Compare numbers with those that are due; `bound` is how far each may be off."""
    got, due = got.double().reshape(-1), due.double().reshape(-1)
    if got.shape != due.shape:
        return Multiple(None, same=False)
    square = float(due.square().sum())
    times = float((got * due).sum()) / square if square else 0.0
    near = bool(((got - times * due).abs() <= bound * max(1.0, abs(times))).all())
    return Multiple(times if near and square else None, bool(((got - due).abs() <= bound).all()))


def of_gradients(reference: WholeRun, run: WholeRun, step: int) -> str:
    """Return the cause where the gradients of some parameters are one multiple of the right ones, and all others are right."""
    wrong: dict[str, float] = {}
    pairs = _pairs_of_gradients(reference, run, step)
    for name, (due, got) in pairs.items():
        here = multiple_of(got, due, _bound(due))
        if here.same:
            continue
        if here.times is None or any(abs(here.times - other) > _SAME * abs(other) for other in wrong.values()):
            return ""
        wrong[name] = here.times
    if not wrong:
        return ""
    first, times = next(iter(wrong.items()))
    rest = "and the others are equal" if len(wrong) < len(pairs) else "each by the same factor"
    return (
        f"Cause: {_as_factor(times, run.size, every=len(wrong) == len(pairs))}. At step {step} the gradients of {len(wrong)} of "
        f"{len(pairs)} parameters, first {first}, are {times:.6g} times those of one process, {rest}."
    )


def _as_factor(times: float, size: int, *, every: bool) -> str:
    summed, divided = abs(times - size) < _SAME * size, abs(times * size - 1) < _SAME
    if summed:
        which = "gradients" if every else "some gradients"
        return f"{which} are summed over ranks, not averaged, or scaled by the number of ranks"
    if divided:
        return "gradients are divided by the number of ranks once too often, or are not summed"
    return "gradients are lost" if abs(times) < _SAME else "gradients are scaled"


def of_change(reference: WholeRun, run: WholeRun, difference: Difference) -> str:
    """Return the cause if a step with the right gradient and settings changes a parameter differently."""
    key, step = difference.quantity, difference.step
    if key.kind is not Kind.PARAMETER or not has_due_gradient(reference, run, key.name, step):
        return ""
    due, got = _change(reference, key, step), _change(run, key, step)
    if due is None or got is None:
        return ""
    after = run.quantities[key][step]
    here = multiple_of(got, due, floor(after.dtype, ROUNDINGS) * float(after.abs().max()))
    if not bool(got.any()):
        what = "does not change it"
    elif here.times is not None:
        what = f"changes it {here.times:.6g} times as much as in one process"
    else:
        what = "changes it differently from one process"
    return (
        f"Cause: the gradient of {key.name} and the optimizer's settings are those of one process, and step {step} {what}. "
        "Look for an update that one rank makes and the others do not get (a broadcast from the wrong rank, a missing gather), "
        "or for a rate or a state that differs on some rank."
    )


def other_groups(reference: WholeRun, run: WholeRun, step: int) -> str:
    """Return the cause if groups that an optimizer steps differently have other shares of all elements than in one process."""
    sizes = [[rank.steps[step].group_sizes for rank in world.ranks] for world in (reference, run)]
    shares = [_group_shares(of_world) for of_world in sizes]
    alike = len({len(of_rank) for of_world in sizes for of_rank in of_world}) == 1
    seen = run.ranks[0].steps[step]
    varied = any(len({*values}) > 1 for values in seen.settings.values() if len(values) == len(seen.group_sizes))
    if not alike or not varied or all(abs(one - other) < _PADDED for one, other in zip(*shares)):
        return ""
    due, got = ([f"{100 * share:.3g}" for share in of_world] for of_world in shares)
    return (
        f"Cause: the optimizer's groups hold other parameters than in one process: {', '.join(got)} % of all elements, expected "
        f"{', '.join(due)} %. A group that is chosen by the shape of parameters (those of two dimensions decay) must be chosen "
        "before the model is sharded, or by name: FSDP1 makes each parameter one-dimensional."
    )


def _group_shares(sizes: Sequence[Sequence[int]]) -> list[float]:
    """Return the share of each group in the elements of all ranks."""
    groups = [sum(group) for group in zip(*sizes)]
    return [group / max(sum(groups), 1) for group in groups]


def of_updates(run: WholeRun, odd: Disagreement) -> str:
    """Return the cause if ranks step the same weights by the same gradient to different weights."""
    key, step = odd.quantity, odd.step
    if key.kind is not Kind.PARAMETER or not all(rank[step].agreed for rank in run.evidence):
        return ""
    seen = [rank.steps[step] for rank in run.ranks]
    if any(key not in one.before or key not in one.after for one in seen):
        return ""
    if assembled([one.before[key] for one in seen])[1] is not None:
        return ""
    moves = [assembled([one.after[key]])[0] - assembled([one.before[key]])[0] for one in seen]
    still = [rank for rank, move in enumerate(moves) if not bool(move.nan_to_num().any())]
    on = f"rank(s) {', '.join(map(str, still))} do not change it" if still else "each changes it differently"
    return (
        f"Cause: all ranks have the same weights and the same gradient of {key.name} before step {step}, and their "
        f"optimizers step differently: {on}. An update that one rank makes for all is not sent to the others (a "
        f"missing broadcast or "
        "gather), or a rate or a state is each rank's own."
    )


def of_unreduced(run: WholeRun, odd: Disagreement) -> str:
    """Return the cause if only some parameters have different gradients on the ranks."""
    steps = [rank.steps[odd.step] for rank in run.ranks]
    # A clip by the norm of all scales each gradient by what one of them alone may change.
    kind = Kind.UNCLIPPED if all(step.of(Kind.UNCLIPPED) for step in steps) else Kind.GRADIENT
    seen = [step.of(kind) for step in steps]
    own = [name for name in seen[0] if assembled([gradients.get(name, ()) for gradients in seen])[1] is not None]
    explains = bool(own) if kind is Kind.UNCLIPPED else odd.quantity.name in own
    if not explains or len(own) == len(seen[0]):
        return ""
    late = odd.step > 0 and not any(
        bool(span.values.any())
        for rank in run.ranks
        for before in rank.steps[: odd.step]
        for name in own
        for span in before.of(Kind.GRADIENT).get(name, ())
    )
    advice = (
        "They have none before this step: a wrapper such as DDP reduces the parameters that require gradients when it is made. "
        "Wrap the model after it is unfrozen, or again."
        if late
        else "Wrap or shard the module that holds them too (the root as well), or all-reduce them."
    )
    if run.shares_work and len({*zip(*run.rows)}) == run.size:
        advice = (
            "Ranks that have parts of one layer (tensor parallelism) must take the same rows, and no two ranks do: give the "
            "sampler rank and number of the data-parallel dimension. Otherwise all-reduce these gradients."
        )
    return (
        f"Cause: the gradients of {len(own)} of {len(seen[0])} parameters are not reduced, first that of {own[0]}: each rank has "
        f"its own when the optimizer steps. {advice}"
    )


def of_own_counts(reference: WholeRun, run: WholeRun, step: int) -> str:
    """Return the cause where one process has a mean of the ranks' gradients by weights, and the ranks have the plain mean."""
    ranks = [summed_terms(rank.steps[step].terms.passes) for rank in run.ranks]
    names = [name for name in ranks[0] if all(name in rank for rank in ranks)]
    wanted, given = (_whole_gradient(one, names, step) for one in (reference, run))
    if wanted is None or given is None:
        return ""
    terms = [torch.cat([rank[name].double().reshape(-1) for name in names]) for rank in ranks]
    bound = floor(ranks[0][names[0]].dtype, CLEAR_ROUNDINGS) * max(float(term.abs().max()) for term in terms)
    busy = [rank for rank, term in enumerate(terms) if bool(term.any())]
    weights = weights_of(wanted, [terms[rank] for rank in busy], bound)
    if weights is None or terms[0].shape != given.shape:
        return ""
    plain = bool(((torch.stack(terms).mean(0) - given).abs() <= bound).all())
    uneven = max(abs(weight - 1 / run.size) for weight in weights) > UNEVEN
    if not (plain and uneven and min(weights) > 0 and _are_shares(weights, run.size)):
        return ""
    rows = [len(rank) for rank in run.rows[step]]
    if len(busy) == run.size and all(abs(one / sum(rows) - weight) < UNEVEN for one, weight in zip(rows, weights)):
        return ""  # an uneven batch: each counts by its rows
    idle = "" if len(busy) == run.size else f" of rank(s) {', '.join(map(str, busy))}, the only ones that are not zero,"
    return (
        f"Cause: the loss is divided by the rank's own count (of tokens, of weights). At step {step} one process weights the "
        f"ranks' gradients{idle} by {', '.join(str(round(weight, 4)) for weight in weights)}, and the ranks take their plain "
        "mean. Divide by the count of all ranks, times the number of ranks where gradients are averaged."
    )


def _are_shares(weights: Sequence[float], size: int) -> bool:
    """Whether weights of some ranks are shares of a whole, of which ranks with a gradient of zero have the rest."""
    if len(weights) == size:
        return abs(sum(weights) - 1) < UNEVEN
    # The weight of one rank alone is a share by its look only: another divisor makes it a simple fraction.
    simple = len(weights) == 1 and abs(Fraction(weights[0]).limit_denominator(_SIMPLE) - weights[0]) < UNEVEN**2
    return sum(weights) < 1 - UNEVEN and not simple


def _whole_gradient(run: WholeRun, names: Sequence[str], step: int) -> torch.Tensor | None:
    """Return the gradients of parameters at a step as one row of numbers, as they are without clips."""
    kind = Kind.UNCLIPPED if run.names(Kind.UNCLIPPED) else Kind.GRADIENT
    values = [run.quantities.get(Quantity(kind, name), [])[step : step + 1] for name in names]
    return torch.cat([one[0].double().reshape(-1) for one in values]) if names and all(values) else None


def of_ranks(reference: WholeRun, run: WholeRun, each: Sequence[WholeRun]) -> str:
    """Return the cause shown by one process that gets the rows of each rank in turn, until its first step.

    Args:
        reference: One process with the rows of all ranks.
        run: The world.
        each: One process for each rank, with that rank's rows.
    """
    names = [key.name for key in run.names(_kind_of(run))]
    due, got = (_as_one_row(world, names) for world in (reference, run))
    apart = [_as_one_row(one, names) for one in each]
    if due is None or got is None or any(row is None or row.shape != got.shape for row in (due, *apart)):
        return ""
    rows = [row for row in apart if row is not None]
    units = [max(seen.evidence.roundoff, seen.terms.roundoff) for world in (run, *each) for seen in first_steps(world)]
    bound = part(max(units), CLEAR_ROUNDINGS) * max(float(row.abs().max()) for row in rows)
    wanted, given = weights_of(due, rows, bound), weights_of(got, rows, bound)
    if given is None or (wanted is not None and max(abs(one - two) for one, two in zip(given, wanted)) <= UNEVEN):
        return ""
    counts = [f"{run.size * weight:.3g}" for weight in given]
    plain = max(abs(run.size * weight - 1) for weight in given) <= UNEVEN
    if _is_mean(given) and (plain or wanted is None or not _is_mean(wanted)):
        return _OWN_OUTSIDE.format("" if plain else f", which count {' and '.join(counts)} times,")
    if wanted is None or not _is_mean(wanted):
        return ""
    ranks = ", ".join(f"rank {rank} by {count}" for rank, count in enumerate(counts))
    others = ", ".join(f"{run.size * weight:.3g}" for weight in wanted)
    return (
        f"Cause: ranks scale their losses: {ranks}, expected {others}. At step 0 the gradient is the mean over ranks of that "
        "many times what one process computes from the rows of each. Scale every rank's loss by the same number, one "
        "that does not depend on the number of ranks."
    )


def of_own_number(run: WholeRun, odd: Disagreement) -> str:
    """Return the cause where weights agree and an optimizer keeps a number that is each rank's own; empty elsewhere."""
    values = run.quantities.get(odd.quantity, [])
    number = odd.kind is Kind.MOMENT and len(values) > odd.step and values[odd.step].numel() == 1
    weights = [one for one in run.disagreements if one.kind is Kind.PARAMETER and one.moment <= odd.moment]
    if not number or weights:
        return ""
    return (
        "Cause: the optimizer is given another number on each rank, as the loss that a closure returns. Average it over ranks "
        "before the optimizer gets it."
    )


def is_own_statistic(cause: str) -> bool:
    """Whether a cause is a statistic of each rank, so that one process does the same with the rows of each in turn."""
    return cause.startswith(_OWN)


def _is_mean(weights: Sequence[float]) -> bool:
    return min(weights) > 0 and abs(sum(weights) - 1) <= UNEVEN


def weights_of(total: torch.Tensor, parts: Sequence[torch.Tensor], bound: float) -> list[float] | None:
    """Return the weights with which parts add up to a total; None if they do not, or if other weights do, too."""
    if not parts:
        return None
    columns = torch.stack([part.double() for part in parts], 1)
    if len(columns) != len(total) or not bool(columns.isfinite().all()) or not bool(total.isfinite().all()):
        return None
    weights = torch.linalg.lstsq(columns, total.double()[:, None]).solution[:, 0]
    singular = torch.linalg.svdvals(columns)
    known = bool(singular[-1] > UNEVEN * singular[0])
    return weights.tolist() if known and bool(((columns @ weights - total).abs() <= bound).all()) else None


def _kind_of(run: WholeRun) -> Kind:
    return Kind.UNCLIPPED if run.names(Kind.UNCLIPPED) else Kind.GRADIENT


def _as_one_row(run: WholeRun, names: Sequence[str]) -> torch.Tensor | None:
    """Return the gradients of the first step as one row, without clips; None where one is not there."""
    values = [run.quantities.get(Quantity(_kind_of(run), name), [])[:1] for name in names]
    return torch.cat([one[0].double().reshape(-1) for one in values]) if names and all(values) else None


def _pairs_of_gradients(reference: WholeRun, run: WholeRun, step: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return expected and actual multiples by parameter, without clips."""
    both = reference.names(Kind.UNCLIPPED) and run.names(Kind.UNCLIPPED)
    kind = Kind.UNCLIPPED if both else Kind.GRADIENT
    pairs = {}
    for key in reference.names(kind):
        due, got = reference.quantities[key], run.quantities.get(key, [])
        if step < min(len(due), len(got)) and due[step].numel():
            pairs[key.name] = due[step], got[step]
    return pairs


def has_due_gradient(reference: WholeRun, run: WholeRun, name: str, step: int) -> bool:
    """Whether the optimizer is given the gradient of one process, but for roundings."""
    due, got = (world.quantities.get(Quantity(Kind.GRADIENT, name), []) for world in (reference, run))
    if step >= min(len(due), len(got)) or not bool(due[step].any()):
        return False
    return multiple_of(got[step], due[step], _bound(due[step])).same


def _change(run: WholeRun, key: Quantity, step: int) -> torch.Tensor | None:
    """Return by how much a step changed a parameter; None where that is not known."""
    values = run.quantities.get(key, [])
    before = values[step - 1 : step] if step else initial(run).get(key, [])
    if step >= len(values) or not before or before[0].shape != values[step].shape:
        return None
    return values[step].double() - before[0].double()


def _bound(due: torch.Tensor) -> float:
    return floor(due.dtype, CLEAR_ROUNDINGS) * (float(due.abs().max()) if due.numel() else 0.0)
