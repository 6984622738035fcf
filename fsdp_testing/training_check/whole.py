"""What did all ranks hold and compute together, from what each was seen to? Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from fsdp_testing.checkers.divergence import DECISIVE
from fsdp_testing.training_check.comparison import Quantities, first_difference, side_by_side
from fsdp_testing.training_check.observation import StepSeen
from fsdp_testing.training_check.spans import assembled

GRADIENT, UNCLIPPED, PARAMETER, MOMENT, BUFFER, COPIED = (
    "gradient of ",
    "gradient before clipping of ",
    "parameter ",
    "optimizer state ",
    "buffer ",
    "the model's own ",
)
RATE, SETTING = "learning rate", "setting "


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
        return f"{self.name} differs between ranks 0 and {self.rank} at step {self.step}"


def together(ranks: Sequence[Sequence[StepSeen]]) -> tuple[Quantities, tuple[Disagreement, ...]]:
    """Return losses, the optimizer's settings, norms, gradients, parameters, its state and buffers of every step.

    Args:
        ranks: What each rank was seen to do; steps that not every rank made are left out.

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
        own = [rank for rank in seen if rank.losses]  # of a pipeline the last stage alone has a loss
        if own:
            loss = torch.tensor([sum(rank.losses) for rank in own], dtype=torch.float64).mean()
            put(step, "loss", loss.to(own[0].loss_dtype))
        if one.norms:
            put(step, "norm that clip_grad_norm_ gave", torch.tensor(one.norms, dtype=one.norm_dtype))
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
            for name in {name: None for rank in spans for name in rank}:
                tensor, odd = assembled([rank.get(name, ()) for rank in spans])
                if odd is not None:
                    found.setdefault(kind, Disagreement(step, kind + name, odd, kind))
                if kind == MOMENT and bool(tensor.isnan().any()):
                    continue  # of a part that no rank has stepped yet the optimizer keeps nothing
                put(step, kind + name, tensor)
    order = (PARAMETER, COPIED, MOMENT, BUFFER, UNCLIPPED, GRADIENT)
    return quantities, tuple(found[kind] for kind in order if kind in found)


def _steps_of(values: Sequence[torch.Tensor]) -> list[bool]:
    return [bool(value.numel()) for value in values]


def only(quantities: Quantities, names: Collection[str]) -> Quantities:
    """Return the quantities of these names."""
    return {name: values for name, values in quantities.items() if name in names}


def comparable(reference: Quantities, other: Quantities, roundings: float) -> tuple[list[str], list[str]]:
    """Return the names of what is to be compared, and sentences on what is not.

    A loss may be each rank's part of a sum, and gradients may be summed where the learning rate is divided: where the
    parameters agree at each step, losses decide nothing, nor do gradients and rates that differ together.
    """
    given = {name: _steps_of(values) for name, values in reference.items()}
    names = [name for name, values in other.items() if given.get(name) == _steps_of(values)]
    left = [f"{name}, which only one of them gives at each step" for name in sorted({*given, *other} - {*names})]

    def differs(start: str) -> bool:
        chosen = [name for name in names if name.startswith(start)]
        return first_difference(only(reference, chosen), only(other, chosen), roundings) is not None

    if not any(name.startswith(PARAMETER) for name in names) or differs(PARAMETER):
        return names, left
    apart: tuple[str, ...] = (UNCLIPPED, GRADIENT, MOMENT, RATE, "norm") if differs(RATE) else ()
    # What roundings may do to a loss in the dtype that it was computed in is asked later; a part of a sum is far from it.
    pairs = [pair for name in names if name == "loss" for pair in zip(reference[name], other[name])]
    apart += ("loss",) if any(bool(((one - two).abs() > DECISIVE * one.abs()).any()) for one, two in pairs) else ()
    if apart:
        left.append("what need not agree where parameters do: " + ", ".join(one.strip() for one in apart))
    return [name for name in names if not name.startswith(apart)], left


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
