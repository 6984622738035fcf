"""Faults that show only in models that users compile."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from planting import planted

from fsdp_ref.runtime import forward
from fsdp_ref.storage.precision import cast_floating

SOUND, COMPOSABLE = "fsdp_ref-wrapper", "fsdp_ref-composable"
_FULLY_SHARD = importlib.import_module("fsdp_ref.api.fully_shard")  # its package has a function of this name


@planted(COMPOSABLE, _FULLY_SHARD, "attach", "compile.units compile.low_precision compile.reloaded")
def forgets_compilation(original: Any, module: Any, *more: Any, **options: Any) -> Any:
    """Units run as they were before they were compiled."""
    units = original(module, *more, **options)
    for inner in module.modules():
        inner._compiled_call_impl = None
    return units


@planted(SOUND, forward, "exit_forward", "compile.model")
def compiled_models_have_no_graph(original: Any, frame: Any, output: Any) -> Any:
    """Nothing leads from the outputs of a model that is compiled back to its parameters."""
    output = original(frame, output)
    return output.detach() if frame.unit.holder._compiled_call_impl else output


@planted(SOUND, forward, "_inputs", "compile.low_precision")
def compiled_units_round_their_inputs(original: Any, unit: Any, frame: Any, args: Any, kwargs: Any) -> Any:
    """A unit that is compiled computes with fewer digits of its inputs."""
    args, kwargs = original(unit, frame, args, kwargs)
    low = torch.float8_e5m2 if unit.module._compiled_call_impl else None
    return (
        (args, kwargs)
        if low is None
        else tuple(cast_floating(cast_floating(x, low), torch.bfloat16) for x in (args, kwargs))
    )
