"""Computes the mean of the ranks' gradients, cast by cast, and how far a correct implementation may be from it.

Pending on a rank are the gradients of micro-batches without synchronisation, with the sizes of their summands. A sum that
cancels is no more exact than its summands: the sizes of all summands bound the effect of another order of additions, not the
size of the sum (Higham, Accuracy and Stability of Numerical Algorithms, 4.2).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fsdp_testing.adapters.protocol import Division
from fsdp_testing.cases.records import UNDERFLOW, UNIT_ROUNDOFF
from fsdp_testing.errors import HarnessError
from fsdp_testing.oracle.models import dtype_name

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class LocalGradients:
    """What one backward of one rank gave.

    Attributes:
        values: Gradient by FQN.
        sizes: In float64, the sum of the absolute contributions to each, if each is known; otherwise the gradient's absolute
            value.
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
        wire: Dtype of the reduction: pending gradients add up in no narrower dtype. None for the gradients' dtype.
        values: By FQN.
        sizes: By FQN, as those of `LocalGradients`, added up.
    """

    wire: torch.dtype | None = None
    values: Tensors = field(default_factory=dict)
    sizes: Tensors = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.values)

    def add(self, gradients: LocalGradients) -> None:
        """Add the gradients of one more micro-batch."""
        for fqn, gradient in gradients.values.items():
            pending = fqn in self.values
            wider = gradient.dtype if self.wire is None else torch.promote_types(gradient.dtype, self.wire)
            self.values[fqn] = self.values[fqn] + gradient if pending else gradient.to(wider, copy=True)
            self.sizes[fqn] = self.sizes[fqn] + gradients.sizes[fqn] if pending else gradients.sizes[fqn]

    def scale(self, factor: float) -> None:
        self.values = {fqn: gradient * factor for fqn, gradient in self.values.items()}


def mean_size(ranks: Sequence[PendingGradients], fqn: str, like: torch.Tensor) -> torch.Tensor:
    """Return the sizes of all summands of one parameter, divided by the number of ranks; in float64, shaped as `like`."""
    sizes = [rank.sizes[fqn] for rank in ranks if fqn in rank.sizes]
    return sum(sizes, torch.zeros_like(like, dtype=torch.float64)) / len(ranks)


def gradients_of(
    parameters: Mapping[str, torch.nn.Parameter], contributions: Mapping[int, torch.Tensor]
) -> LocalGradients:
    """Take what a backward left in `parameters`.

    Args:
        parameters: Parameters by FQN.
        contributions: The sum of absolute contributions by the identity of the parameter, where units were watched.
    """
    values = {fqn: p.grad for fqn, p in parameters.items() if p.grad is not None}
    sizes = {fqn: gradient.abs().double() for fqn, gradient in values.items()}
    for fqn, size in sizes.items():
        # A parameter of two units may be watched in one of them only.
        contributed = contributions.get(id(parameters[fqn]))
        sizes[fqn] = size if contributed is None else torch.maximum(size, contributed)
    return LocalGradients(values, sizes)


@dataclass(frozen=True, slots=True)
class Reduced:
    """A mean over ranks.

    Attributes:
        mean: In the dtype of the stored parameter.
        magnitude: In float64, per element, sum over ranks of the absolute contributions divided by the world size.
        error: In float64, per element, how far another order of the same roundings may be off; 0 where the bits are determined.
        derivation: Derivation of `error`.
    """

    mean: torch.Tensor
    magnitude: torch.Tensor
    error: torch.Tensor
    derivation: str


def reduce(
    contributions: Sequence[torch.Tensor], wire: torch.dtype, stored: torch.dtype, division: Division | None
) -> Reduced:
    """Cast each rank's gradient to `wire`, divide, add in rank order, divide, cast to `stored`.

    Args:
        contributions: One gradient per rank, in the dtype in which it was computed.
        wire: Dtype of the reduction.
        stored: Dtype of the parameter that gets the gradient.
        division: How the implementation divides; None if it does not say.
    """
    size = len(contributions)
    before, after = (1.0, float(size)) if division is None else (division.before, division.after)
    parts = [contribution.to(wire) for contribution in contributions]
    if before != 1.0:
        parts = [part / before for part in parts]
    # A copy: where nothing is cast, added or divided, the mean would be the rank's own gradient.
    total = parts[0].clone()
    for part in parts[1:]:
        total = total + part
    if after != 1.0:
        total = total / after
    # Bounds are in float64: a rounding of a small number in float16 is less than the smallest number of float16.
    magnitude = sum((c.abs().double() for c in contributions), torch.zeros_like(total, dtype=torch.float64)) / size
    roundings, why = _roundings(size, division)
    unit = UNIT_ROUNDOFF[dtype_name(wire)]
    # Dividing by a power of two is exact except for numbers that cannot be halved; for these the time of the division matters.
    halved = (magnitude != 0) & (magnitude < 2 * size * torch.finfo(wire).tiny)
    smallest = 2 * UNDERFLOW[dtype_name(wire)] * halved if division is None and size > 1 else 0.0
    return Reduced(
        mean=total.to(stored),
        magnitude=magnitude,
        error=magnitude * (roundings * unit) + smallest,
        derivation=f"{roundings} x u({dtype_name(wire)}) x sum|g_r|/N ({why})" if roundings else why,
    )


def _roundings(size: int, division: Division | None) -> tuple[int, str]:
    """Return how many roundings may differ: additions in another order, and inexact divisions."""
    additions = size - 1 if size > 2 else 0
    exact = math.log2(size).is_integer()
    divisions = 0 if division is not None or exact else 2
    if not additions and not divisions:
        return 0, "bitwise: two summands commute and the division is exact"
    # If a sum may differ, so may the roundings of the division after it.
    divisions = divisions or (0 if exact else 1)
    # Both sides round: one may be off upwards where the other is off downwards.
    return 2 * (additions + divisions), f"twice {additions} additions in any order and {divisions} divisions"


def roundings(count: int, dtypes: Sequence[torch.dtype], size: torch.Tensor) -> torch.Tensor:
    """Return the largest error of `count` roundings of numbers up to `size`, each in the coarsest of `dtypes`.

    Each is off by a share of the number, or by half the smallest representable number if that is more: a sum of small numbers is
    exact, but their cast and their half are not. Whole numbers are not rounded.
    """
    names = [dtype_name(dtype) for dtype in dtypes if dtype.is_floating_point] or ["float64"]
    return (size.double() * max(UNIT_ROUNDOFF[n] for n in names) + max(UNDERFLOW[n] for n in names)) * count


def require_backward(*, unreduced: bool) -> None:
    """Demand that there is a backward in which gradients of `no_sync` can be reduced.

    Raises:
        HarnessError: They are left from earlier micro-batches, and no rank's loss trains anything now: no implementation
            is called, and each goes on with what its ranks hold.
    """
    if unreduced:
        raise HarnessError("oracle: expected a backward after no_sync, got losses that train nothing. Thaw parameters.")
