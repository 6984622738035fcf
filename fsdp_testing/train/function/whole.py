"""What did all ranks hold and compute together, from what each was seen to? Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fsdp_testing.cases.records.tolerance import UNIT_ROUNDOFF
from fsdp_testing.judging.checkers.divergence import DECISIVE
from fsdp_testing.train.function.comparison import (
    CLEAR_ROUNDINGS,
    Difference,
    Quantities,
    first_difference,
    part,
    side_by_side,
)
from fsdp_testing.train.function.evidence import StepEvidence
from fsdp_testing.train.function.held import Spans
from fsdp_testing.train.function.observation import StepSeen
from fsdp_testing.train.function.spans import assembled

GRADIENT, UNCLIPPED, PARAMETER, MOMENT, BUFFER, COPIED = (
    "gradient of ",
    "gradient before clipping of ",
    "parameter ",
    "optimizer state ",
    "buffer ",
    "the model's own ",
)
RATE, SETTING = "learning rate", "setting "
NORM = "norm that clip_grad_norm_ gave"
END = "weights at the end of "
"""Kinds of quantities, and their names as a person reads them."""
AFTER_THE_LAST = -1
"""Step of what is seen when the training has ended."""
Compare = Callable[[Sequence[str], Sequence[float]], Difference | None]
"""Compares quantities of two runs by name; the gradients of the second, and their norm, times a factor for each step."""


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Ranks that hold different numbers of what they share; `kind` starts the names of all quantities like this one."""

    step: int
    name: str
    rank: int
    kind: str

    @property
    def decides(self) -> bool:
        """Whether it is a mistake as such; ranks may have gradients of their own and yet make one step."""
        return self.kind not in (GRADIENT, UNCLIPPED)

    def __str__(self) -> str:
        when = "at the end" if self.step == AFTER_THE_LAST else f"at step {self.step}"
        return f"{self.name} differs between ranks 0 and {self.rank} {when}"


def together(
    ranks: Sequence[Sequence[StepSeen]], own: Collection[str] = ()
) -> tuple[Quantities, tuple[Disagreement, ...]]:
    """Return losses, the optimizer's settings, norms, gradients, parameters, its state and buffers of every step.

    Args:
        ranks: What each rank was seen to do; steps that not every rank made are left out.
        own: Parameters that each rank has of its own: these are left out.

    Returns:
        The quantities by name, and of each kind where ranks first disagree, parameters first. What is not there at a step, as
        the state of an optimizer that another step belongs to, is an empty tensor.
    """
    quantities: Quantities = {}
    found: dict[str, Disagreement] = {}
    steps = min(map(len, ranks), default=0)
    absent = [torch.empty(0)] * steps

    def put(step: int, name: str, value: torch.Tensor) -> None:
        quantities.setdefault(name, list(absent))[step] = value

    for step, seen in enumerate(zip(*ranks)):
        one = seen[0]
        ending = [rank for rank in seen if rank.losses]  # of a pipeline the last stage alone has a loss
        if ending:
            loss = torch.tensor([sum(rank.losses) for rank in ending], dtype=torch.float64).mean()
            put(step, "loss", loss.to(ending[0].loss_dtype))
        if one.norms:
            put(step, NORM, torch.tensor(one.norms, dtype=one.norm_dtype))
        for kind, spans in (
            (UNCLIPPED, [rank.unclipped for rank in seen]),
            (GRADIENT, [rank.gradients for rank in seen]),
            (PARAMETER, [rank.parameters for rank in seen]),
            (COPIED, [rank.copied for rank in seen]),
            (MOMENT, [rank.moments for rank in seen]),
            (BUFFER, [rank.buffers for rank in seen]),
        ):
            if kind == PARAMETER:
                for name, values in one.settings.items():
                    name = RATE if name == "lr" else SETTING + name
                    put(step, name, torch.tensor(values, dtype=torch.float64))
            for name, tensor, odd in _assembled(spans, own):
                if odd is not None:
                    found.setdefault(kind, Disagreement(step, kind + name, odd, kind))
                if kind == MOMENT and bool(tensor.isnan().any()):
                    continue  # of a part that no rank has stepped yet the optimizer keeps nothing
                put(step, kind + name, tensor)
    order = (PARAMETER, COPIED, MOMENT, BUFFER, UNCLIPPED, GRADIENT)
    return quantities, tuple(found[kind] for kind in order if kind in found)


def _steps_of(values: Sequence[torch.Tensor]) -> list[bool]:
    return [bool(value.numel()) for value in values]


def _assembled(ranks: Sequence[Spans], own: Collection[str]) -> Iterator[tuple[str, torch.Tensor, int | None]]:
    for name in {name: None for spans in ranks for name in spans}:
        if name not in own and name.split(" of ", 1)[-1] not in own:
            yield name, *assembled([spans.get(name, ()) for spans in ranks])


def at_end(ranks: Sequence[Spans], own: Collection[str] = ()) -> tuple[Quantities, tuple[Disagreement, ...]]:
    """Return the parameters with which a training ended, and the first on which ranks disagree."""
    found = list(_assembled(ranks, own))
    odd = [Disagreement(AFTER_THE_LAST, END + name, rank, END) for name, _, rank in found if rank is not None]
    return {END + name: [tensor] for name, tensor, _ in found}, tuple(odd[:1])


def at_start(ranks: Sequence[Sequence[StepSeen]]) -> Quantities:
    """Return the parameters as the first step that has them found them."""
    found: Quantities = {}
    for seen in zip(*ranks):
        for name in seen[0].before:
            if PARAMETER + name not in found:
                tensor = assembled([rank.before.get(name, ()) for rank in seen])[0]
                found[PARAMETER + name] = found[END + name] = [tensor]
    return found


def own_parts(ranks: Sequence[Sequence[StepSeen]], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, None]:
    """Return the parameters that each rank has of its own though others have some by the same name, as experts and stages.

    Those with other numbers on some ranks before the first step, or with another shape than in the reference world; and the
    others of their modules, which may begin alike.

    Args:
        ranks: What each rank was seen to do.
        shapes: Those of the parameters of the reference world; empty of that world itself.
    """
    first: dict[str, Sequence[StepSeen]] = {}
    for seen in zip(*ranks):
        for name in {name: None for rank in seen for name in rank.before}:
            first.setdefault(name, seen)
    apart = {name: assembled([rank.before.get(name, ()) for rank in seen])[1] for name, seen in first.items()}
    shaped = {n: next((s.shape for r in seen for s in r.before.get(n, ())), ()) for n, seen in first.items()}
    found = {n for n in first if apart[n] is not None or (len(ranks) > 1 and shaped[n] != shapes.get(n, shaped[n]))}
    modules = {name.rpartition(".")[0] for name in found if "." in name}
    return {name: None for name in first if name in found or name.rpartition(".")[0] in modules}


def shapes_of(ranks: Sequence[Sequence[StepSeen]]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter."""
    return {n: tuple(s[0].shape) for rank in ranks for seen in rank for n, s in seen.parameters.items() if s}


def with_agreement(
    evidence: Sequence[Sequence[StepEvidence]],
    ranks: Sequence[Sequence[StepSeen]],
    disagreements: Sequence[Disagreement],
) -> tuple[tuple[StepEvidence, ...], ...]:
    """Note at which steps ranks are given the same gradients of all that they share.

    Args:
        evidence: Of each rank, step by step.
        ranks: What each was seen to do.
        disagreements: The first of each kind.
    """
    apart = min((found.step for found in disagreements if found.kind == GRADIENT), default=len(ranks[0]))
    read = [step < apart and all(seen.gradients for seen in ranks_) for step, ranks_ in enumerate(zip(*ranks))]
    return tuple(
        tuple(replace(one, agreed=step < len(read) and read[step]) for step, one in enumerate(rank))
        for rank in evidence
    )


def only(quantities: Quantities, names: Collection[str]) -> Quantities:
    """Return the quantities of these names."""
    return {name: values for name, values in quantities.items() if name in names}


def rescaled(quantities: Quantities, factors: Sequence[float]) -> Quantities:
    """Return quantities with the gradients, and their norm, times a factor for each step; as they are without factors."""
    scaled = (UNCLIPPED, GRADIENT, NORM)
    return {
        name: [value * factor for value, factor in zip(values, factors)]
        if factors and name.startswith(scaled)
        else values
        for name, values in quantities.items()
    }


def comparable(
    reference: Quantities, other: Quantities, roundings: float, compare: Compare | None = None
) -> tuple[list[str], list[str]]:
    """Return the names of what is to be compared, and sentences on what is not.

    A loss may be each rank's part of a sum, and gradients may be summed where the learning rate is divided: where the
    parameters agree at each step, losses decide nothing, nor do gradients and rates of which the product agrees.

    Args:
        reference: What it is compared with.
        other: What is judged.
        roundings: Admitted, in units of roundoff.
        compare: Compares quantities of both; within these roundings by default.
    """
    given = {name: _steps_of(values) for name, values in reference.items()}
    names = [name for name, values in other.items() if given.get(name) == _steps_of(values)]
    left = [f"{name}, which only one of them gives at each step" for name in sorted({*given, *other} - {*names})]

    def at_once(chosen: Sequence[str], factors: Sequence[float]) -> Difference | None:
        return first_difference(only(reference, chosen), only(rescaled(other, factors), chosen), roundings)

    def differs(kinds: tuple[str, ...], factors: Sequence[float] = ()) -> bool:
        chosen = [name for name in names if name.startswith(kinds)]
        return bool(chosen) and (compare or at_once)(chosen, factors) is not None

    if not any(name.startswith(PARAMETER) for name in names) or differs((PARAMETER,)):
        return names, left
    apart: tuple[str, ...] = ()
    factors = _rate_factors(reference, other) if RATE in names and differs((RATE,)) else []
    if factors and not differs((UNCLIPPED, GRADIENT, NORM), factors):
        apart = (UNCLIPPED, GRADIENT, MOMENT, RATE, "norm")
        left.append(
            f"gradients are {1 / factors[0]:.6g} times, and learning rates {factors[0]:.6g} times, those of the reference: "
            "their product agrees, and so do parameters"
        )
    # What roundings may do to a loss in the dtype that it was computed in is asked later; a part of a sum is far from it.
    pairs = [pair for name in names if name == "loss" for pair in zip(reference[name], other[name])]
    apart += ("loss",) if any(bool(((one - two).abs() > DECISIVE * one.abs()).any()) for one, two in pairs) else ()
    if apart:
        left.append("what need not agree where parameters do: " + ", ".join(one.strip() for one in apart))
    return [name for name in names if not name.startswith(apart)], left


def _rate_factors(reference: Quantities, other: Quantities) -> list[float]:
    """Return by which one factor the rates of all groups are larger at each step; empty without one.

    Where all rates are zero, as in a warm-up, the factor is that of the first step with another rate.
    """
    found: list[float | None] = []
    for one, two in zip(reference[RATE], other[RATE]):
        filled = one != 0
        if one.shape != two.shape or bool((two[~filled] != 0).any()):
            return []
        ratios = two[filled] / one[filled]
        if bool((ratios != 0).all()) and len(ratios) and bool(((ratios / ratios[0] - 1).abs() <= _ONE_FACTOR).all()):
            found.append(float(ratios[0]))
        elif len(ratios):
            return []
        else:
            found.append(None)
    first = next((factor for factor in found if factor is not None), None)
    return [] if first is None else [first if factor is None else factor for factor in found]


_ONE_FACTOR = 1e-9
"""Relative; rates are computed in float64 by few operations."""


def vanishing(runs: Sequence[Quantities], roundoff: float) -> list[str]:
    """Return the quantities of parameters whose gradient is zero but for roundings, in all runs and steps.

    As that of a key's bias in attention. What the optimizer makes of it, Adam at full length, is known of no run.

    Args:
        runs: What was computed.
        roundoff: Of the narrowest dtype that any of it was computed in.
    """
    found: list[str] = []
    for name in runs[0]:
        parameter = name.removeprefix(GRADIENT)
        if name.startswith(GRADIENT) and all(_vanishes(name, run, roundoff) for run in runs if name in run):
            found += [parameter, *(kind + parameter for kind in (UNCLIPPED, GRADIENT, PARAMETER, COPIED, END))]
            found += [one for one in runs[0] if one.startswith(MOMENT) and one.endswith(f" of {parameter}")]
    return found


def _vanishes(name: str, run: Quantities, roundoff: float) -> bool:
    others = [values for other, values in run.items() if other.startswith(GRADIENT)]
    for step, gradient in enumerate(run[name]):
        largest = max(
            float(values[step].abs().max()) for values in others if step < len(values) and values[step].numel()
        )
        unit = max(roundoff, UNIT_ROUNDOFF.get(str(gradient.dtype).removeprefix("torch."), 0.0))
        if gradient.numel() and float(gradient.abs().max()) > part(unit, CLEAR_ROUNDINGS) * largest:
            return False
    return True


def nothing_trained(start: Quantities, run: Quantities, *, gradients_seen: bool = True) -> str:
    """Return what a run lacks that trained nothing, so that nothing follows from its agreement; empty if it trained.

    Args:
        start: Parameters before the first step.
        run: What was computed, with the parameters after each step.
        gradients_seen: Whether the optimizer steps the tensors that have the gradients.
    """
    moved = [
        not torch.equal(value, start[name][0])
        for name, values in run.items()
        if name in start
        for value in values
        if value.shape == start[name][0].shape
    ]
    gradients = [value for name, values in run.items() if name.startswith(GRADIENT) for value in values]
    zero = gradients_seen and bool(gradients) and not any(bool(gradient.any()) for gradient in gradients)
    said = ["no gradient other than zero"] if zero else []
    said += ["no parameter that changes"] if moved and not any(moved) else []
    return " and ".join(said)


def loss_table(reference: Quantities, other: Quantities, size: int, other_size: int) -> tuple[str, ...]:
    """Return loss and norm of the gradient of both worlds, step by step; empty where no step was seen."""
    steps = min(len(reference.get("loss", [])), len(other.get("loss", [])))
    columns = [
        [(float(one["loss"][step].double().sum()), _norm(one, step)) for step in range(steps)]
        for one in (reference, other)
    ]
    return side_by_side(columns[0], columns[1], size, other_size) if steps else ()


def _norm(quantities: Quantities, step: int) -> float:
    squares = [
        float(values[step].double().square().sum())
        for name, values in quantities.items()
        if name.startswith(GRADIENT) and step < len(values)
    ]
    return float(sum(squares) ** 0.5)
