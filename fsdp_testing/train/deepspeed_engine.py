"""Reads DeepSpeed's parameters, gradients and optimizer state through its own public accessors.

These assemble whole tensors from all ranks: every rank of the engine must call them at the same step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fsdp_testing.adapters.protocol import Piece, StateEntry
from fsdp_testing.adapters.shared import naming, pieces


def is_engine(model: nn.Module) -> bool:
    """Whether a model is an engine of DeepSpeed, of any stage of ZeRO."""
    deepspeed = sys.modules.get("deepspeed")
    return deepspeed is not None and isinstance(model, deepspeed.DeepSpeedEngine)


def unread(engine: Any, stepped: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the stepped tensors that no accessor reads: masters of stage 0 in low precision."""
    parameters = [*engine.module.parameters()]
    if any(hasattr(parameter, mark) for parameter in parameters for mark in ("ds_id", "_hp_mapping")):
        return []
    known = {*map(id, parameters)}
    return [tensor for tensor in stepped if id(tensor) not in known]


def held(engine: Any, *, gradients: bool) -> dict[str, tuple[Piece, ...]]:
    """Return each parameter whole, in the dtype that the optimizer steps, and with `gradients` its accumulated gradient.

    Collectives: some for each parameter of stage 1 and above. Gradients are there after backward and before the step only.
    """
    utils: Any = sys.modules["deepspeed.utils"]
    parameters: dict[str, tuple[Piece, ...]] = {}
    for name, parameter in naming.named_parameters(engine.module):
        value = utils.safe_get_full_fp32_param(parameter)
        gradient = utils.safe_get_full_grad(parameter) if gradients and parameter.requires_grad else None
        value = parameter if value is None else value
        parameters[name] = (
            Piece(
                tuple(value.shape),
                0,
                value.numel(),
                value.detach(),
                grad=None if gradient is None else gradient.detach(),
                requires_grad=parameter.requires_grad,
            ),
        )
    return parameters


def moments(engine: Any) -> dict[str, dict[str, StateEntry]]:
    """Return what the optimizer keeps of each parameter, whole; nothing where DeepSpeed has no accessor for it (stage 0).

    Collectives: as `held`.
    """
    utils: Any = sys.modules["deepspeed.utils"]
    kept = engine.basic_optimizer.state.values() if engine.basic_optimizer is not None else ()
    keys = sorted({key for state in kept for key, value in state.items() if torch.is_tensor(value) and value.ndim})
    states: dict[str, dict[str, StateEntry]] = {}
    for name, parameter in naming.named_parameters(engine.module):
        for key in keys if parameter.requires_grad else ():
            value = utils.safe_get_full_optimizer_state(parameter, key)
            if value is not None:
                states.setdefault(name, {})[key] = pieces.of_tensor(value)
    return states


def see_steps(engine: Any, begin: Callable[[Any], None], end: Callable[[Any], None]) -> None:
    """Have `begin` and `end` called with the engine's optimizer around each step that changes weights, from now on."""
    original = engine.step

    def step(*args: Any, **kwargs: Any) -> Any:
        if not engine.is_gradient_accumulation_boundary():
            return original(*args, **kwargs)
        begin(engine.optimizer)
        result = original(*args, **kwargs)
        end(engine.optimizer)
        return result

    engine.step = step
