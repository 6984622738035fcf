"""Random cases: one generator, with Hypothesis (`cases`) or the fuzzer's fast seeded source as input."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsdp_testing.base import extras
from fsdp_testing.cases.drawing.choices import Choices, SeededChoices
from fsdp_testing.cases.drawing.drawing import CaseDrawer
from fsdp_testing.cases.drawing.features import FEATURES, Scope
from fsdp_testing.cases.drawing.normal_form import legal_case, needs_of_case

if TYPE_CHECKING:
    from fsdp_testing.cases.drawing.hypothesis_source import cases

__all__ = ["FEATURES", "CaseDrawer", "Choices", "Scope", "SeededChoices", "cases", "legal_case", "needs_of_case"]


def __getattr__(name: str) -> Any:
    # A campaign does not need Hypothesis, and importing it takes longer than drawing a thousand cases.
    if name == "cases":
        with extras.needed("hypothesis"):
            from fsdp_testing.cases.drawing.hypothesis_source import cases

            return cases
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
