"""Explains a wrong total norm: the norm of some gradients, of one rank's own, with another power, or plus an earlier norm.

A p-norm is a sum of powers: the excess over the right sum, or the lack, is compared with the share of each parameter, module
and dtype. It is named only if exactly one share accounts for it, within the bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from fsdp_testing.cases.records import UNIT_ROUNDOFF

_POWERS = (1.0, 2.0, 3.0, math.inf)
_NO_NORMS: Mapping[int, float] = {}


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm that is wrong.

    Attributes:
        got: The value on a rank.
        due: The expected value.
        bound: The largest allowed error.
        p: Order of the norm.
        dtype: Its dtype in one process.
    """

    got: float
    due: float
    bound: float
    p: float
    dtype: str = "float64"

    def near(self, value: float) -> bool:
        """Whether it is another number, within the bound and a few roundings."""
        return abs(self.got - value) <= self.bound + self._roundings(value)

    def is_of(self, gradients: Mapping[str, torch.Tensor]) -> bool:
        """Whether the right norm is that of these gradients."""
        return abs(power_norm(gradients.values(), self.p) - self.due) <= self.bound + self._roundings(self.due)

    def _roundings(self, value: float) -> float:
        return 8 * UNIT_ROUNDOFF.get(self.dtype, 0.0) * abs(value)


def power_norm(tensors: Iterable[torch.Tensor], p: float) -> float:
    """Return the p-norm of all elements, in float64."""
    filled = [tensor.double().reshape(-1) for tensor in tensors if tensor.numel()]
    return float(torch.linalg.vector_norm(torch.cat(filled), p)) if filled else 0.0


def norm_of_what(
    norm: Norm,
    gradients: Mapping[str, torch.Tensor],
    mine: Sequence[torch.Tensor] | None = None,
    earlier: Mapping[int, float] = _NO_NORMS,
    *,
    lacks_elements: bool = False,
    units: Mapping[str, str] | None = None,
) -> str:
    """Return what a wrong norm is, after "is"; empty if that is not certain.

    Args:
        norm: The norm.
        gradients: Those that are measured, by FQN, in one process.
        mine: The rank's parts of them; None if unknown.
        earlier: Earlier norms, by operation.
        lacks_elements: The ranks with a wrong norm are exactly those that have no element of some parameter.
        units: The unit that each of the gradients is in, where that is known.
    """
    if norm.got == 0.0:
        return "zero, as if there were no gradient"
    if math.isnan(norm.got) and lacks_elements:
        return "no number, just where ranks have no element of some parameter"
    if math.isinf(norm.p) and norm.got == 1.0 != norm.due:
        return "1, because any number to the power 1/p is 1 for infinite p"
    if not norm.due or not math.isfinite(norm.due) or not math.isfinite(norm.got) or not gradients:
        return ""
    # First: one element may be in two norms, and look like a gradient that counts twice.
    summed = list(_with_an_earlier_one(norm, earlier))
    if len(summed) == 1:
        return summed[0]
    accounts = list(_other_norms(norm, gradients, mine, earlier)) if norm.is_of(gradients) else []
    accounts += _parts(norm, gradients, units or {}) if norm.p != math.inf else ()
    return accounts[0] if len(accounts) == 1 else ""


def _with_an_earlier_one(norm: Norm, earlier: Mapping[int, float]) -> Iterator[str]:
    for index, value in earlier.items():
        if math.isinf(norm.p):
            both = value if value > norm.due and math.isfinite(value) else 0.0
        else:
            both = (norm.due**norm.p + value**norm.p) ** (1 / norm.p)
        if value and both and norm.near(both):
            yield f"the norm of the gradients and of the norm of operation {index}"


def _other_norms(
    norm: Norm, gradients: Mapping[str, torch.Tensor], mine: Sequence[torch.Tensor] | None, earlier: Mapping[int, float]
) -> Iterator[str]:
    if mine is not None and norm.near(power_norm(mine, norm.p)):
        yield "the norm of the rank's own part of the gradients"
    for p in _POWERS:
        if p != norm.p and norm.near(power_norm(gradients.values(), p)):
            yield f"the {'largest element' if math.isinf(p) else f'{p:g}-norm'}"
    for index, value in earlier.items():
        if value and norm.near(norm.due + value):
            yield f"the right norm plus the norm of operation {index}"
    narrow = float(torch.tensor(norm.got, dtype=torch.float64).float()) == norm.got
    if narrow and norm.dtype == "float64" and abs(norm.got - norm.due) <= UNIT_ROUNDOFF["float32"] * norm.due:
        yield "the right values, rounded to float32"


def _parts(norm: Norm, gradients: Mapping[str, torch.Tensor], units: Mapping[str, str]) -> Iterator[str]:
    powers = {fqn: float((gradient.double().abs() ** norm.p).sum()) for fqn, gradient in gradients.items()}
    whole = sum(powers.values())
    # The error of a norm's power if the norm is off by the bound.
    room = norm.p * max(norm.got, norm.due) ** (norm.p - 1) * norm.bound
    if abs(whole - norm.due**norm.p) <= room:
        for words, power in _sums_of_powers(whole, powers, gradients, units).items():
            if abs(power - norm.got**norm.p) <= room:
                yield words


def _sums_of_powers(
    whole: float, powers: Mapping[str, float], gradients: Mapping[str, torch.Tensor], units: Mapping[str, str]
) -> dict[str, float]:
    """Sums of powers, by the norm that each would give."""
    sums = {f"the norm of all gradients, each counted {often} times": whole * often for often in range(2, 9)}
    groups: dict[str, set[str]] = {}
    for fqn, gradient in gradients.items():
        parents = [".".join(fqn.split(".")[:depth]) for depth in range(1, fqn.count(".") + 1)]
        unit = [f"those of {units[fqn] or 'the root'}"] if fqn in units else []
        for group in (fqn, *parents, str(gradient.dtype).removeprefix("torch."), *unit):
            groups.setdefault(group, set()).add(fqn)
    for members in dict.fromkeys(frozenset(members) for members in groups.values() if len(members) < len(powers)):
        name = next(group for group, inside in groups.items() if inside == members)
        part = sum(powers[fqn] for fqn in members)
        if part:
            sums[f"the norm of all gradients but {name}"] = whole - part
            sums[f"the norm of all gradients, with {name} twice"] = whole + part
    return sums
