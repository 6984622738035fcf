"""What did all ranks hold and compute together, from what each was seen to? Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from fsdp_testing.checkers.tensors import same_bits
from fsdp_testing.training_check.comparison import Quantities, first_difference, side_by_side
from fsdp_testing.training_check.observation import Span, StepSeen

GRADIENT, PARAMETER = "gradient of ", "parameter "


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Ranks that hold different numbers of what they share: a gradient, or a parameter after the step."""

    step: int
    name: str
    rank: int
    gradient: bool

    @property
    def kind(self) -> str:
        """Start of the names of all quantities like this one."""
        return GRADIENT if self.gradient else PARAMETER

    def __str__(self) -> str:
        return f"{self.name} differs between ranks 0 and {self.rank} at step {self.step}"


def together(ranks: Sequence[Sequence[StepSeen]]) -> tuple[Quantities, tuple[Disagreement, ...]]:
    """Return losses, learning rates, norms, gradients and parameters of every step, and where ranks first disagree.

    Args:
        ranks: What each rank was seen to do; steps that not every rank made are left out.
    """
    quantities: Quantities = {}
    found: dict[bool, Disagreement] = {}

    def add(name: str, value: torch.Tensor) -> None:
        quantities.setdefault(name, []).append(value)

    for step, seen in enumerate(zip(*ranks)):
        add("loss", torch.tensor([sum(one.losses) for one in seen], dtype=torch.float64).mean())
        if seen[0].norms:
            add("norm that clip_grad_norm_ gave", torch.tensor(seen[0].norms, dtype=torch.float64))
        for what, spans in ((GRADIENT, [one.gradients for one in seen]), (PARAMETER, [one.parameters for one in seen])):
            for name in spans[0]:
                tensor, odd = assembled([rank.get(name, ()) for rank in spans])
                if odd is not None:
                    gradient = what == GRADIENT
                    found.setdefault(gradient, Disagreement(step, what + name, odd, gradient))
                add(what + name, tensor)
            if what == GRADIENT:
                add("learning rate", torch.tensor(seen[0].rates, dtype=torch.float64))
    return quantities, tuple(found.values())


def assembled(ranks: Sequence[tuple[Span, ...]]) -> tuple[torch.Tensor, int | None]:
    """Return the whole tensor, NaN where no rank has any of it, and the first rank that contradicts an earlier one."""
    spans = [(rank, span) for rank, held in enumerate(ranks) for span in held]
    if not spans:
        return torch.full((), torch.nan), None
    _, (shape, _, _, sample) = spans[0]
    full = torch.full((torch.Size(shape).numel(),), torch.nan, dtype=sample.dtype)
    known, odd = torch.zeros(full.numel(), dtype=torch.bool), None
    for rank, (_, start, stop, values) in spans:
        here = slice(start, stop)
        again = known[here]
        if odd is None and bool(again.any()) and not same_bits(full[here][again], values[again]):
            odd = rank
        full[here] = torch.where(again, full[here], values)
        known[here] = True
    return full.view(shape), odd


def only(quantities: Quantities, names: Collection[str]) -> Quantities:
    """Return the quantities of these names."""
    return {name: values for name, values in quantities.items() if name in names}


def comparable(reference: Quantities, other: Quantities, roundings: float) -> tuple[list[str], list[str]]:
    """Return the names of what is to be compared, and sentences on what is not.

    A loss may be each rank's part of a sum, and gradients may be summed where the learning rate is divided: where the
    parameters agree at each step, losses decide nothing, nor do gradients and rates that differ together.
    """
    counts = {name: len(values) for name, values in reference.items()}
    names = [name for name, values in other.items() if counts.get(name) == len(values)]
    left = [f"{name}, which only one of them gives at each step" for name in sorted({*counts, *other} - {*names})]

    def differs(start: str) -> bool:
        chosen = [name for name in names if name.startswith(start)]
        return first_difference(only(reference, chosen), only(other, chosen), roundings) is not None

    if not any(name.startswith(PARAMETER) for name in names) or differs(PARAMETER):
        return names, left
    apart: tuple[str, ...] = (GRADIENT, "learning", "norm") if differs("learning") else ()
    apart += ("loss",) if differs("loss") else ()
    if apart:
        left.append("what need not agree where parameters do: " + ", ".join(one.strip() for one in apart))
    return [name for name in names if not name.startswith(apart)], left


def loss_table(reference: Quantities, other: Quantities, size: int, other_size: int) -> tuple[str, ...]:
    """Return loss and norm of the gradient of both worlds, step by step; empty where no step was seen."""
    steps = min(len(reference.get("loss", [])), len(other.get("loss", [])))
    columns = [[(float(one["loss"][step]), _norm(one, step)) for step in range(steps)] for one in (reference, other)]
    return side_by_side(columns[0], columns[1], size, other_size) if steps else ()


def _norm(quantities: Quantities, step: int) -> float:
    squares = [
        float(values[step].double().square().sum())
        for name, values in quantities.items()
        if name.startswith(GRADIENT) and step < len(values)
    ]
    return float(sum(squares) ** 0.5)
