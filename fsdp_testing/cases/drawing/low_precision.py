"""Models that are stored in 16 bits, and what few digits exclude from a case."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fsdp_testing.cases.drawing.choices import Choices
from fsdp_testing.cases.models import MODELS
from fsdp_testing.cases.models.tree_schema import parameters
from fsdp_testing.cases.records import Case
from fsdp_testing.cases.records.specs import LOW_DTYPES


def stored_low(case: Case, choices: Choices) -> Case:
    """Return the case with its model stored in 16 bits, if that means the same for every implementation."""
    return replace(case, model=replace(case.model, dtype=choices.pick(LOW_DTYPES))) if may_be_stored_low(case) else case


def may_be_stored_low(case: Case) -> bool:
    """Whether the model may be stored in 16 bits: one low dtype at a time, since implementations cast in different places."""
    if getattr(case.mixed_precision, "param_dtype", None) is not None:
        return False
    if case.model.tree is None:
        model = MODELS.get(case.model.name)
        return model is not None and not model.traits & {"mixed_dtypes", "strided"}
    return not any(spec.dtype for spec in parameters(case.model.tree))


def without_strides(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree with every parameter in row-major order."""
    return {
        key: [without_strides(inner) for inner in value] if key == "nodes" else value
        for key, value in node.items()
        if key != "strided"
    }
