"""The optimizer's steps of a replay, and how far off a correct implementation may be after one.

An implementation steps flat parameters or shards where the oracle steps whole ones. On the CPU torch rounds a 16-bit element
differently at the end of a tensor than inside a whole vector, so its last bit depends on its place.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING

import torch

from fsdp_testing.cases.operations import Batch
from fsdp_testing.oracle.quantities import Quantity
from fsdp_testing.oracle.reduction import Reduced, reduce, roundings
from fsdp_testing.oracle.tensors import largest

if TYPE_CHECKING:
    from fsdp_testing.oracle.replay import Replay

DIRECTIONS = 4
"""Factor on an observed deviation, for directions of rounding that were not tried."""


def step(replay: Replay, errors: Mapping[str, torch.Tensor] | None = None) -> None:
    """Step the optimizer, and allow for the roundings of its formula.

    Args:
        replay: The replay; without an optimizer nothing happens.
        errors: By FQN, how far off a gradient may be that was reduced but never compared; 0 by default.
    """
    if replay.optimizer is None:
        return
    # Only in lockstep do bounds belong to one operation.
    moved = _moved(replay, errors or {}) if replay.adopted is not None else {}
    before = {fqn: parameter.detach().abs().double() for fqn, parameter in replay.parameters.items()}
    replay.optimizer.step()
    replay.disturbance.step(replay.parameters)
    for fqn, parameter in replay.parameters.items():
        slack = roundings(16, (parameter.dtype,), before[fqn] + parameter.detach().abs().double())
        slack = slack + moved.get(Quantity("value", fqn), 0.0)
        replay.allow("value", fqn, slack, "16 roundings of the optimizer's formula x (|before| + |after|)")
        for name, entry in replay.optimizer_state(parameter).items():
            if getattr(entry, "shape", None) == parameter.shape:
                size = entry.detach().abs().double()
                if parameter.grad is not None:
                    gradient = parameter.grad.detach().abs().double()
                    size = size + gradient.maximum(gradient.square()) + before[fqn]
                slack = roundings(8, (parameter.dtype,), size) + moved.get(Quantity("optimizer", fqn, name), 0.0)
                replay.allow("optimizer", fqn, slack, "8 roundings of the state's formula", name)


def train_among(replay: Replay, ranks: int, batch: Batch, max_norm: float | None) -> None:
    """Make a step on the mean gradient of this many ranks, from the first on; for one rank nothing is averaged.

    Args:
        replay: Replay of the case.
        ranks: How many train.
        batch: Their inputs.
        max_norm: The mean gradient is clipped to this norm; None leaves it as it is.
    """
    replay.refresh()
    by_rank = [replay.local_gradients(rank, batch)[1].values for rank in range(ranks)]
    names = dict.fromkeys(fqn for gradients in by_rank for fqn in gradients)
    zero = {fqn: torch.zeros_like(replay.compute[fqn]) for fqn in names}
    means = {
        fqn: reduce([g.get(fqn, zero[fqn]) for g in by_rank], zero[fqn].dtype, replay.parameters[fqn].dtype, None)
        for fqn in names
    }
    if replay.optimizer is not None:
        _give(replay, means)
        errors = {fqn: mean.error for fqn, mean in means.items()}
        step(replay, errors if max_norm is None else _clipped(replay, errors, max_norm))
    replay.clear_gradients()
    # All ranks load what the first of these saved, its buffers too.
    with torch.no_grad():
        for replica in replay.replicas[1:]:
            for buffer, first in zip(replica.buffers(), replay.replicas[0].buffers()):
                buffer.copy_(first)


def _give(replay: Replay, means: Mapping[str, Reduced]) -> None:
    size = max((largest(mean.magnitude) for mean in means.values()), default=0.0)
    for fqn, mean in means.items():
        replay.parameters[fqn].grad = replay.disturbance.gradient(mean.mean, mean.magnitude, size).clone()


def _clipped(replay: Replay, errors: Mapping[str, torch.Tensor], max_norm: float) -> dict[str, torch.Tensor]:
    """Clip the gradients by their norm; return how far off each may be then: the norm is off by as much as what it is of."""
    parameters = [replay.parameters[fqn] for fqn in errors]
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, max_norm))
    count = sum(parameter.numel() for parameter in parameters)
    replay.disturbance.clip(parameters, count)
    scale = min(1.0, max_norm / (norm + 1e-6))
    of_the_norm = sum(float(error.square().sum()) for error in errors.values()) ** 0.5 / norm if norm else 0.0
    off: dict[str, torch.Tensor] = {}
    for fqn, error in errors.items():
        gradient = replay.parameters[fqn].grad
        if gradient is not None:
            rounded = (count + 8) * replay.unit_roundoff(gradient)
            off[fqn] = error * scale + gradient.abs().double() * (of_the_norm + rounded)
    return off


def _moved(replay: Replay, errors: Mapping[str, torch.Tensor]) -> dict[Quantity, torch.Tensor]:
    """How far off each quantity may be after a step on gradients that are off by `errors`."""
    if not any(bool(error.any()) for error in errors.values()):
        return {}
    right, *others = (_stepped(replay, errors, sign) for sign in (0.0, 1.0, -1.0))
    return {
        quantity: torch.stack([(other[quantity] - value).abs() for other in others]).amax(0) * DIRECTIONS
        for quantity, value in right.items()
    }


def _stepped(replay: Replay, errors: Mapping[str, torch.Tensor], sign: float) -> dict[Quantity, torch.Tensor]:
    """Values and states after a step of a copy, with each gradient moved by its error."""
    copies, optimizer = deepcopy((replay.parameters, replay.optimizer))
    assert optimizer is not None
    for fqn, parameter in replay.parameters.items():
        if parameter.grad is not None:
            error = sign * errors[fqn].to(parameter.dtype) if fqn in errors else 0.0
            copies[fqn].grad = parameter.grad + error
    optimizer.step()
    result = {Quantity("value", fqn): copy.detach() for fqn, copy in copies.items()}
    for fqn, copy in copies.items():
        for name, entry in optimizer.state.get(copy, {}).items():
            if getattr(entry, "shape", None) == copy.shape:
                result[Quantity("optimizer", fqn, name)] = entry
    return result
