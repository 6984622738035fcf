"""Decides what must agree in two runs: losses can be read in several ways, gradients and rates may differ by one factor. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from fsdp_testing.judging.checkers.divergence import DECISIVE
from fsdp_testing.oracle.models import roundoff
from fsdp_testing.train.comparison import CLEAR_ROUNDINGS, Difference, first_difference, part, side_by_side
from fsdp_testing.train.quantities import LOSS, RATE, Kind, Quantities, Quantity, rank_count
from fsdp_testing.train.whole import WholeRun

Compare = Callable[[Sequence[Quantity], Sequence[float]], Difference | None]
"""Compares quantities of two runs; the gradients of the second, and their norm, times a factor for each step."""
_SCALED = (Kind.UNCLIPPED, Kind.GRADIENT, Kind.NORM)
_ONE_FACTOR = 1e-9
"""Relative; rates are computed in float64 by few operations."""


@dataclass(frozen=True, slots=True)
class Comparable:
    """The quantities of two runs to compare.

    Attributes:
        names: The quantities.
        missing: Quantities that only one run gives at each step.
        apart: Kinds that need not agree if parameters do.
        factor: Factor by which all rates exceed the reference's, if gradients are smaller by the same factor.
    """

    names: list[Quantity]
    missing: tuple[Quantity, ...] = ()
    apart: tuple[Kind, ...] = ()
    factor: float | None = None

    def left_out(self, *, losses: bool = True) -> list[str]:
        """Return sentences on what is not compared; on losses only if they are not judged elsewhere."""
        sentences = [f"{what}, which only one of both worlds has at each step" for what in _by_quantity(self.missing)]
        if self.factor is not None:
            sentences.append(
                f"gradients are {1 / self.factor:.6g} times, and learning rates {self.factor:.6g} times, those of the reference: "
                "their product agrees, and so do parameters"
            )
        kinds = [kind for kind in self.apart if losses or kind is not Kind.LOSS]
        if kinds:
            words = ["norm" if kind is Kind.NORM else kind.value.strip() for kind in kinds]
            sentences.append("ignored because parameters agree: " + ", ".join(words))
        return sentences


def _by_quantity(keys: Sequence[Quantity]) -> list[str]:
    """Name these quantities, of many parameters at once."""
    together: dict[tuple[Kind, str], list[Quantity]] = {}
    for key in keys:
        together.setdefault((key.kind, key.part), []).append(key)
    return [
        str(alike[0]) if len(alike) == 1 else f"{alike[0]} and {len(alike) - 1} more" for alike in together.values()
    ]


def only(quantities: Quantities, names: Collection[Quantity]) -> Quantities:
    """Return these quantities alone."""
    chosen = set(names)
    return {key: values for key, values in quantities.items() if key in chosen}


def rescaled(quantities: Quantities, factors: Sequence[float]) -> Quantities:
    """Return quantities with the gradients, and their norm, times a factor for each step; as they are without factors."""
    return {
        key: [value * factor for value, factor in zip(values, factors)] if factors and key.kind in _SCALED else values
        for key, values in quantities.items()
    }


def comparable(
    reference: Quantities,
    other: Quantities,
    roundings: float,
    compare: Compare | None = None,
    *,
    losses_are_equal: bool = False,
) -> Comparable:
    """Return what to compare.

    A loss may be each rank's part of a sum, and gradients may be summed if the learning rate is divided. So if the parameters
    agree at each step, losses decide nothing, nor do gradients and rates whose product agrees.

    Args:
        reference: The run to compare with.
        other: The run to judge.
        roundings: Admitted, in units of roundoff.
        compare: Compares quantities of both; within these roundings by default.
        losses_are_equal: Whether losses decide all the same.
    """
    given = {key: _steps_of(values) for key, values in reference.items()}
    names = [key for key, values in other.items() if given.get(key) == _steps_of(values)]
    missing = tuple(sorted({*given, *other} - {*names}, key=str))

    def at_once(chosen: Sequence[Quantity], factors: Sequence[float]) -> Difference | None:
        return first_difference(only(reference, chosen), only(rescaled(other, factors), chosen), roundings)

    def differs(kinds: tuple[Kind, ...], factors: Sequence[float] = ()) -> bool:
        chosen = [key for key in names if key.kind in kinds]
        return bool(chosen) and (compare or at_once)(chosen, factors) is not None

    if not any(key.kind is Kind.PARAMETER for key in names) or differs((Kind.PARAMETER,)):
        return Comparable(names, missing)
    apart: tuple[Kind, ...] = ()
    factors = _rate_factors(reference, other) if RATE in names and differs((Kind.RATE,)) else []
    factor = factors[0] if factors and not differs(_SCALED, factors) else None
    if factor is not None:
        apart = (Kind.UNCLIPPED, Kind.GRADIENT, Kind.MOMENT, Kind.RATE, Kind.NORM)
    # What roundings may do to a loss in the dtype that it was computed in is asked later; a part of a sum is far from it.
    losses = zip(reference[LOSS], other[LOSS]) if LOSS in names and not losses_are_equal else ()
    if any(bool(((one - two).abs() > DECISIVE * one.abs()).any()) for one, two in losses):
        apart += (Kind.LOSS,)
    return Comparable([key for key in names if key.kind not in apart], missing, apart, factor)


def _steps_of(values: Sequence[object]) -> list[bool]:
    return [bool(value.numel()) for value in values]  # type: ignore[attr-defined]  # tensors


def _rate_factors(reference: Quantities, other: Quantities) -> list[float]:
    """Return the one factor by which the rates of all groups are larger at each step; empty without one.

    If all rates are zero, as in a warm-up, the factor is that of the first step with a nonzero rate.
    """
    factors: list[float | None] = []
    for one, two in zip(reference[RATE], other[RATE]):
        filled = one != 0
        if one.shape != two.shape or bool((two[~filled] != 0).any()):
            return []
        ratios = two[filled] / one[filled]
        if bool((ratios != 0).all()) and len(ratios) and bool(((ratios / ratios[0] - 1).abs() <= _ONE_FACTOR).all()):
            factors.append(float(ratios[0]))
        elif len(ratios):
            return []
        else:
            factors.append(None)
    first = next((factor for factor in factors if factor is not None), None)
    return [] if first is None else [first if factor is None else factor for factor in factors]


def vanishing(runs: Sequence[Quantities], narrowest: float) -> set[Quantity]:
    """Return the quantities of parameters whose gradient is zero up to rounding, in all runs and steps.

    An example is a key's bias in attention. The optimizer's update from such a gradient, full-size with Adam, is arbitrary.

    Args:
        runs: The runs.
        narrowest: Roundoff of the narrowest dtype that any of them was computed in.
    """
    names = {
        key.name
        for key in runs[0]
        if key.kind is Kind.GRADIENT and all(_vanishes(key, run, narrowest) for run in runs if key in run)
    }
    kinds = (Kind.RETURNED, Kind.UNCLIPPED, Kind.GRADIENT, Kind.PARAMETER, Kind.COPIED, Kind.END, Kind.MOMENT)
    return {key for run in runs for key in run if key.name in names and key.kind in kinds}


def _vanishes(key: Quantity, run: Quantities, narrowest: float) -> bool:
    gradients = [values for other, values in run.items() if other.kind is Kind.GRADIENT]
    for step, gradient in enumerate(run[key]):
        largest = max(
            float(values[step].abs().max()) for values in gradients if step < len(values) and values[step].numel()
        )
        unit = max(narrowest, roundoff(gradient.dtype))
        if gradient.numel() and float(gradient.abs().max()) > part(unit, CLEAR_ROUNDINGS) * largest:
            return False
    return True


def loss_table(reference: WholeRun, other: WholeRun, names: tuple[str, str] | None = None) -> tuple[str, ...]:
    """Return loss and norm of the gradient of both worlds, step by step; empty where no step was seen.

    Args:
        reference: One world.
        other: The other.
        names: Names of both, where it is not their size that tells them apart.
    """
    losses = [run.quantities.get(LOSS, []) for run in (reference, other)]
    steps = min(map(len, losses))
    columns = [
        [(float(values[step].double().sum()), _norm(run, step)) for step in range(steps)]
        for run, values in zip((reference, other), losses)
    ]
    names = names or (rank_count([reference.size]), rank_count([other.size]))
    return side_by_side(columns[0], columns[1], names) if steps else ()


def _norm(run: WholeRun, step: int) -> float | None:
    """Return the norm of the gradient at a step; None if there was none to measure."""
    values = [run.quantities[key][step : step + 1] for key in run.names(Kind.GRADIENT)]
    squares = [float(one[0].double().square().sum()) for one in values if one and one[0].numel()]
    given = any(rank.steps[step].given for rank in run.ranks)
    return float(sum(squares) ** 0.5) if squares and given else None
