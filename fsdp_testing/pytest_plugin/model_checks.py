"""How are models tried under pytest? `@parametrize_with_models()` makes one test of each model under each implementation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from fsdp_testing.errors import InvalidArgument
from fsdp_testing.model_check import MODELS, ModelDiffers, ModelReport, check_model
from fsdp_testing.model_check.check import ACCELERATE, check_names
from fsdp_testing.pool.targets import target_of

if TYPE_CHECKING:
    from torch import nn

IMPLEMENTATIONS = ("torch-ddp", "torch-fsdp2", ACCELERATE, "fsdp_ref-wrapper")


@dataclass(frozen=True, slots=True)
class BoundModel:
    """One model under one implementation; call it.

    Attributes:
        model: Family of Transformers, or function that makes a model.
        implementation: "accelerate", or name or import string of an implementation.
        world_size: Number of ranks.
        steps: Optimizer steps.
    """

    model: str | Callable[[], nn.Module]
    implementation: str
    world_size: int = 2
    steps: int = 2

    def __call__(self) -> ModelReport:
        """Compare with one process; raises as `fsdp_testing.model_check.check_model` does."""
        return check_model(self.model, self.implementation, world_size=self.world_size, steps=self.steps)


def parametrize_with_models(
    *models: str | Callable[[], nn.Module],
    implementations: Sequence[str] = IMPLEMENTATIONS,
    world_size: int = 2,
    steps: int = 2,
    expected_failures: Mapping[str, str] | None = None,
) -> pytest.MarkDecorator:
    """Parametrize a test function over models and implementations; its argument is `check`, and it calls `check()`.

    Args:
        *models: Families of causal language models of Transformers (`"llama"`), or importable functions that make models; by
            default those of `fsdp_testing.model_check.MODELS`.
        implementations: "accelerate", or names or import strings of implementations.
        world_size: Number of ranks.
        steps: Optimizer steps that are compared.
        expected_failures: Reason by name of a test ("llama-torch-fsdp2"); such a test is a strict xfail.

    Raises:
        InvalidArgument: Transformers or Accelerate is needed and not installed, an implementation is unknown, a function is
            not importable, or an expected failure names no test.
    """
    chosen = models or MODELS
    check_names(chosen, implementations)
    expected = dict(expected_failures or {})
    tests: dict[str, Any] = {}
    for model in chosen:
        name = model if isinstance(model, str) else target_of(model).qualname
        for implementation in implementations:
            tests[f"{name}-{implementation}"] = BoundModel(model, implementation, world_size, steps)
    unknown = sorted({*expected} - {*tests})
    if unknown:
        raise InvalidArgument(
            f"expected_failures: expected names as {next(iter(tests))!r}, got {unknown}. Correct them."
        )
    parameters = [
        pytest.param(
            bound,
            id=name,
            marks=[pytest.mark.xfail(reason=expected[name], raises=ModelDiffers, strict=True)]
            if name in expected
            else [],
        )
        for name, bound in tests.items()
    ]
    return pytest.mark.parametrize("check", parameters)
