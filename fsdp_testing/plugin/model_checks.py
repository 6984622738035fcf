"""Models under pytest: `@parametrize_with_models()` makes one test of each model under each implementation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import pytest

from fsdp_testing.errors import InvalidArgument
from fsdp_testing.judging.signature import as_pattern
from fsdp_testing.ranks.pool.targets import target_of
from fsdp_testing.train.model import ACCELERATE, ModelDiffers, ModelReport, check_model, check_names
from fsdp_testing.train.model_families import MODELS

if TYPE_CHECKING:
    from torch import nn

IMPLEMENTATIONS = ("torch-ddp", "torch-fsdp2", ACCELERATE, "fsdp_ref-wrapper")


class ModelDiffersAsExpected(ModelDiffers):
    """A model trains differently, with the message that `expected_failures` names."""


@dataclass(frozen=True, slots=True)
class BoundModel:
    """One model under one implementation; call it.

    Attributes:
        model: Family of Transformers, or function that makes a model.
        implementation: "accelerate", or name or import string of an implementation.
        world_size: Number of ranks.
        steps: Optimizer steps.
        reason: Why it is known to differ; empty if it is not.
        says: A part of the message of that difference, as a pattern (fnmatch).
    """

    model: str | Callable[[], nn.Module]
    implementation: str
    world_size: int = 2
    steps: int = 2
    reason: str = ""
    says: str = ""

    def __call__(self) -> ModelReport:
        """Compare with one process; raises as `fsdp_testing.train.model.check_model` does.

        Raises:
            ModelDiffersAsExpected: It trains differently, in the known way.
        """
        try:
            return check_model(self.model, self.implementation, world_size=self.world_size, steps=self.steps)
        except ModelDiffers as differs:
            if not self.reason:
                raise
            if self.says and fnmatchcase(str(differs), f"*{self.says}*"):
                raise ModelDiffersAsExpected(str(differs)) from differs
            entry = {"reason": self.reason, "says": as_pattern(str(differs).splitlines()[0])}
            known = (
                f"by {self.says!r}; this failure differs"
                if self.says
                else "without `says`, which would excuse anything"
            )
            raise ModelDiffers(
                f"{differs}\nListed as known {known}. To expect this failure, write: {entry}"
            ) from differs


def parametrize_with_models(
    *models: str | Callable[[], nn.Module],
    implementations: Sequence[str] = IMPLEMENTATIONS,
    world_size: int = 2,
    steps: int = 2,
    expected_failures: Mapping[str, str | Mapping[str, str]] | None = None,
) -> pytest.MarkDecorator:
    """Parametrize a test function over models and implementations; its argument is `check`, and it calls `check()`.

    Args:
        *models: Families of causal language models of Transformers (`"llama"`), or importable functions that make models; by
            default those of `fsdp_testing.train.model_families.MODELS`.
        implementations: "accelerate", or names or import strings of implementations.
        world_size: Number of ranks.
        steps: Optimizer steps that are compared.
        expected_failures: `{"reason": ..., "says": ...}` by name of a test ("llama-torch-fsdp2"): why it differs, and a part
            of its message, as a pattern (fnmatch). Such a test is a strict xfail; any other difference fails.

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
    wrong = sorted(
        name for name, entry in expected.items() if not isinstance(entry, str) and {*entry} != {"reason", "says"}
    )
    if wrong:
        raise InvalidArgument(
            f"expected_failures: expected entries with reason and says, got others for {wrong}. Correct them."
        )
    parameters = [_parameter(name, bound, expected.get(name)) for name, bound in tests.items()]
    return pytest.mark.parametrize("check", parameters)


def _parameter(name: str, bound: BoundModel, entry: str | Mapping[str, str] | None) -> Any:
    if entry is None:
        return pytest.param(bound, id=name)
    reason, says = (entry, "") if isinstance(entry, str) else (entry["reason"], entry["says"])
    mark = pytest.mark.xfail(reason=reason, raises=ModelDiffersAsExpected, strict=True)
    return pytest.param(replace(bound, reason=reason, says=says), id=name, marks=[mark])
