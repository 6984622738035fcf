"""The comparable quantities of worlds. Each has a kind and a name; its sentence is made here and never parsed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from fsdp_testing.train.spans import Span


class Kind(Enum):
    """Kind of a quantity, with the words shown before its name."""

    RETURNED = ""
    LOSS = "loss"
    NORM = "norm that clip_grad_norm_ returned"
    UNCLIPPED = "gradient before clipping of "
    GRADIENT = "gradient of "
    RATE = "learning rate"
    SETTING = "setting "
    PARAMETER = "parameter "
    COPIED = "the model's own "
    MOMENT = "optimizer state "
    BUFFER = "buffer "
    END = "weights at the end of "
    COPY = "weights kept as "
    LOGGED = "number taken at "


@dataclass(frozen=True, slots=True)
class Quantity:
    """One quantity of a training.

    Attributes:
        kind: What it is.
        name: Name of the parameter, buffer, setting, line or returned value; empty if there is only one of its kind.
        part: For an optimizer's state the name of its tensor; for a copy of weights the variable that holds it.
    """

    kind: Kind
    name: str = ""
    part: str = ""

    def __str__(self) -> str:
        if self.kind is Kind.MOMENT:
            return f"{self.kind.value}{self.part} of {self.name}"
        if self.kind is Kind.COPY:
            return f"{self.kind.value}{self.part!r}, {self.name}"
        return self.kind.value + self.name


LOSS, NORM, RATE = Quantity(Kind.LOSS), Quantity(Kind.NORM), Quantity(Kind.RATE)
Quantities = dict[Quantity, list["torch.Tensor"]]
"""The value of each step; one value where a quantity belongs to the end. An empty tensor stands for none at a step."""
QuantitySpans = dict[Quantity, tuple["Span", ...]]
"""One rank's part of each quantity."""


def rank_count(sizes: Sequence[int]) -> str:
    """Return numbers of ranks as words: "1 rank", "2, 3 ranks"."""
    return f"{', '.join(map(str, sizes))} rank{'' if sizes == [1] else 's'}"


def spans_of_kind(spans: QuantitySpans, kind: Kind) -> dict[str, tuple[Span, ...]]:
    """Return the recorded quantities of one kind, by name."""
    return {key.name: kept for key, kept in spans.items() if key.kind is kind}
