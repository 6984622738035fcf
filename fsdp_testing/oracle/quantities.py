"""The named quantities of a program in the order of their creation, and the choice of those to compare."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fsdp_testing.oracle.tensors import largest as largest_of


class Quantity(NamedTuple):
    """One thing that can diverge.

    Attributes:
        kind: `result`, `gradient`, `value`, `optimizer` or `buffer`.
        name: FQN, or the name of a result (`loss`, `output.0`, `structure`, `total_norm`).
        part: Name of an optimizer state (`exp_avg`), held or saved, else empty.
        rank: The rank that holds it alone (results, buffers); -1 if it is one value over all ranks.
    """

    kind: str
    name: str
    part: str = ""
    rank: int = -1

    @property
    def sort(self) -> str:
        """Sort of quantity: `gradient`, `value`, `optimizer exp_avg`, `buffer`, `total_norm`, `full parameter`, `output`."""
        if self.kind == "result" and self.name.startswith("full."):
            return "full parameter"
        if self.part:
            return f"optimizer {self.part}"
        if self.kind == "result":
            return "total_norm" if self.name == "total_norm" else "output"
        return self.kind

    @classmethod
    def saved(cls, fqn: str, part: str, rank: int) -> Quantity:
        """Return one state of a parameter's optimizer, as a rank has saved it: a result with a name of its own."""
        return cls("result", f"optimizer.{part}.{fqn}", part, rank)

    @property
    def subject(self) -> str:
        """The name without the state: what several states are states of."""
        return self.name.removeprefix(f"optimizer.{self.part}.") if self.kind == "result" else self.name

    def with_part(self, part: str) -> Quantity:
        """Return another state of the same parameter, held or saved."""
        if self.kind == "result" and self.part:
            return Quantity.saved(self.subject, part, self.rank)
        return self._replace(part=part)

    @property
    def fqn(self) -> str:
        """Parameter or buffer; empty for a result."""
        return "" if self.kind == "result" else self.name

    def __str__(self) -> str:
        if self.kind == "result" and self.part:
            return f"saved optimizer state {self.part} of {self.subject} on rank {self.rank}"
        text = {
            "result": self.name.replace("_", " ").replace("output.", "output ").replace("full.", "full parameter ", 1),
            "gradient": f"gradient of {self.name}",
            "value": f"parameter {self.name}",
            "optimizer": f"optimizer state {self.part} of {self.name}",
            "buffer": f"buffer {self.name}",
        }[self.kind]
        return text if self.rank < 0 else f"{text} on rank {self.rank}"


@dataclass(frozen=True, slots=True)
class Expected:
    """The oracle's expectation of one quantity.

    Attributes:
        value: The tensor, a scalar as a 0-dim tensor, or None (a gradient that is None).
        bound: Largest admissible absolute difference, one number or one per element; 0 demands equal bits.
        derivation: Derivation of the bound.
    """

    value: torch.Tensor | None
    bound: float | torch.Tensor = 0.0
    derivation: str = ""


@dataclass(frozen=True, slots=True)
class ExpectedPoint:
    """The oracle's expectation at one point of the program.

    Attributes:
        index: Operation after which it holds; `len(program)` at the end.
        quantities: In model order.
        requires_grad: Flag per parameter (snapshots only).
        dtypes: Dtype name per parameter (snapshots only).
        snapshot: Whether this is a marked point; otherwise it holds only an operation's results.
        pending: Gradients await reduction: none is compared.
    """

    index: int
    quantities: dict[Quantity, Expected]
    requires_grad: dict[str, bool] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    snapshot: bool = False
    pending: bool = False

    def largest(self, like: Quantity) -> float:
        """Return the largest absolute number that is expected of any quantity of the same kind and part."""
        sizes = (
            largest_of(expected.value)
            for quantity, expected in self.quantities.items()
            if (quantity.kind, quantity.part) == (like.kind, like.part)
        )
        return max(sizes, default=0.0)


@dataclass(frozen=True, slots=True)
class Expectation:
    """The oracle's expectations of a case, in the order of the program."""

    points: tuple[ExpectedPoint, ...]
    shapes: dict[str, tuple[int, ...]]
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a check asks of a comparison.

    Attributes:
        lockstep: The oracle starts each operation from the implementation's own state, and bounds are those of one
            operation; else it runs freely.
        none_is_zero: A gradient of zeros may stand for None and the other way round.
        gradients: Compare gradients.
        optimizer: Compare optimizer state, where the implementation shows it.
        buffers: Compare buffers.
        outputs: Compare losses, outputs and norms.
        ignore: Parameters (fnmatch patterns) that are not compared, such as those outside the implementation.
        tensor_parallel: How many ranks hold one model together; `compare_numbers` sets it. What several of these hold is
            reduced by each of them by itself, so that their sums over three ranks or more may differ in the last bit.
        gradient_dtype: Dtype of every gradient, if it is not its parameter's; `compare_numbers` sets it.
    """

    lockstep: bool = False
    none_is_zero: bool = False
    gradients: bool = True
    optimizer: bool = True
    buffers: bool = True
    outputs: bool = True
    ignore: tuple[str, ...] = ()
    tensor_parallel: int = 1
    gradient_dtype: str | None = None
