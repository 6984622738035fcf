"""What awaits reduction on one rank: the gradients of micro-batches without synchronisation, and how large their summands were.

A sum that cancels is known no better than its summands: what another order of additions may do is bounded by the sizes
of all that was added, not by the size of what is left (Higham, Accuracy and Stability of Numerical Algorithms, 4.2).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class LocalGradients:
    """What one backward of one rank gave.

    Attributes:
        values: Gradient by FQN.
        sizes: In float64, the sum of the absolute contributions to each, where they are known one by one; else its own
            absolute.
    """

    values: Tensors
    sizes: Tensors

    def only(self, names: Collection[str]) -> LocalGradients:
        """Return the gradients of these parameters."""
        pair = [
            {fqn: tensor for fqn, tensor in tensors.items() if fqn in names} for tensors in (self.values, self.sizes)
        ]
        return LocalGradients(*pair)


@dataclass(slots=True)
class PendingGradients:
    """The sums of one rank.

    Attributes:
        wire: Dtype of the reduction: what awaits it adds up in no narrower one. None if it is that of the gradients.
        values: By FQN.
        sizes: By FQN, as those of `LocalGradients`, added up.
    """

    wire: torch.dtype | None = None
    values: Tensors = field(default_factory=dict)
    sizes: Tensors = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.values)

    def add(self, gradients: LocalGradients) -> None:
        """Add the gradients of one more micro-batch to those that are there."""
        for fqn, gradient in gradients.values.items():
            pending = fqn in self.values
            wider = gradient.dtype if self.wire is None else torch.promote_types(gradient.dtype, self.wire)
            self.values[fqn] = self.values[fqn] + gradient if pending else gradient.to(wider, copy=True)
            self.sizes[fqn] = self.sizes[fqn] + gradients.sizes[fqn] if pending else gradients.sizes[fqn]

    def scale(self, factor: float) -> None:
        """Multiply the gradients that are there."""
        self.values = {fqn: gradient * factor for fqn, gradient in self.values.items()}


def mean_size(ranks: Sequence[PendingGradients], fqn: str, like: torch.Tensor) -> torch.Tensor:
    """Return the sizes of all that is added up for one parameter, divided by the number of ranks, in the dtype of `like`."""
    sizes = [rank.sizes[fqn].to(like.dtype) for rank in ranks if fqn in rank.sizes]
    return sum(sizes, torch.zeros_like(like)) / len(ranks)


def gradients_of(
    parameters: Mapping[str, torch.nn.Parameter], contributions: Mapping[int, torch.Tensor]
) -> LocalGradients:
    """Take what a backward left in `parameters`.

    Args:
        parameters: By FQN.
        contributions: The sum of absolute contributions by the identity of the parameter, where units were watched.
    """
    values = {fqn: p.grad for fqn, p in parameters.items() if p.grad is not None}
    sizes = {fqn: gradient.abs().double() for fqn, gradient in values.items()}
    for fqn, size in sizes.items():
        # A parameter of two units may be watched in one of them only.
        contributed = contributions.get(id(parameters[fqn]))
        sizes[fqn] = size if contributed is None else torch.maximum(size, contributed)
    return LocalGradients(values, sizes)
