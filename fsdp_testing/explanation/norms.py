"""Of which gradients is a wrong total norm? Of those of one process with some left out, or counted several times.

A p-norm is a sum of powers: what is there beyond the right sum, or lacks, is compared with what each parameter, module and
dtype adds to it. Said only if one alone accounts for it, within the bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch


def norm_of_what(got: float, due: float, bound: float, norm_type: float, gradients: Mapping[str, torch.Tensor]) -> str:
    """Return what a wrong norm is that of, after "is"; empty if that is not certain.

    Args:
        got: The norm that a rank has.
        due: What it should be.
        bound: How far off it may be.
        norm_type: The p of the norm.
        gradients: Those that are measured, by FQN, in one process.
    """
    if got == 0.0:
        return "zero, as if there were no gradient"
    if norm_type == math.inf or not due or not math.isfinite(got) or not gradients:
        return ""
    powers = {fqn: float((gradient.double().abs() ** norm_type).sum()) for fqn, gradient in gradients.items()}
    whole = sum(powers.values())
    # How far the power of a norm may be off that is itself off by the bound.
    room = norm_type * max(got, due) ** (norm_type - 1) * bound
    if abs(whole - due**norm_type) > room:
        return ""
    found = [
        words for words, power in _candidates(whole, powers, gradients).items() if abs(power - got**norm_type) <= room
    ]
    return found[0] if len(found) == 1 else ""


def _candidates(whole: float, powers: Mapping[str, float], gradients: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Sums of powers by what they would be the norm of."""
    tried = {f"that of all gradients, each counted {often} times": whole * often for often in range(2, 9)}
    groups: dict[str, set[str]] = {}
    for fqn, gradient in gradients.items():
        parents = [".".join(fqn.split(".")[:depth]) for depth in range(1, fqn.count(".") + 1)]
        for group in (fqn, *parents, str(gradient.dtype).removeprefix("torch.")):
            groups.setdefault(group, set()).add(fqn)
    for members in dict.fromkeys(frozenset(members) for members in groups.values() if len(members) < len(powers)):
        name = next(group for group, inside in groups.items() if inside == members)
        part = sum(powers[fqn] for fqn in members)
        if part:
            tried[f"that of all gradients but {name}"] = whole - part
            tried[f"that of all gradients, with {name} twice"] = whole + part
    return tried
