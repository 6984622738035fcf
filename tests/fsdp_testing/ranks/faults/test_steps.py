"""Which calls of optimizers are a step: those of one backward pass together, and none that only has state made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from fsdp_testing.ranks.faults.steps import at_each_step

SGD = torch.optim.SGD


def begun_by(training: Callable[[torch.nn.Module, Any, Any], None]) -> list[str]:
    """Return which of two optimizers began each step of a training."""
    model = torch.nn.Linear(2, 1)
    first, second = SGD([model.weight], lr=0.1), SGD([model.bias], lr=0.1)
    begun: list[Any] = []
    with at_each_step(begun.append):
        training(model, first, second)
    first.step()
    return [{id(first): "first", id(second): "second"}[id(optimizer)] for optimizer in begun]


def loss(model: torch.nn.Module) -> torch.Tensor:
    return model(torch.ones(1, 2)).sum()


def test_two_optimizers_after_one_backward_pass_make_one_step() -> None:
    def training(model: torch.nn.Module, first: Any, second: Any) -> None:
        for _ in range(3):
            loss(model).backward()
            first.step()
            second.step()

    assert begun_by(training) == ["first"] * 3


def test_two_optimizers_with_a_backward_pass_each_make_two() -> None:
    def training(model: torch.nn.Module, first: Any, second: Any) -> None:
        for optimizer in (first, second, second, first):
            loss(model).backward()
            optimizer.step()

    assert begun_by(training) == ["first", "second", "second", "first"]


def test_gradients_set_by_hand_make_a_step_whenever_an_optimizer_steps_again() -> None:
    def training(model: torch.nn.Module, first: Any, second: Any) -> None:
        for _ in range(2):
            model.weight.grad, model.bias.grad = torch.ones(1, 2), torch.ones(1)
            second.step()
            first.step()

    assert begun_by(training) == ["second", "second"]


def test_accumulated_backward_passes_and_a_closure_make_one_step_each() -> None:
    def training(model: torch.nn.Module, first: Any, second: Any) -> None:
        loss(model).backward()
        loss(model).backward()
        first.step()
        for optimizer in (first, second):
            optimizer.step(lambda: loss(model).backward())

    assert begun_by(training) == ["first", "first", "second"]


def test_what_torch_steps_to_have_state_made_is_no_step() -> None:
    def training(model: torch.nn.Module, first: Any, _second: Any) -> None:
        first.step()  # before any gradient, as to quiet a schedule of learning rates
        whole = SGD(model.parameters(), lr=0.1, momentum=0.9)
        assert get_optimizer_state_dict(model, whole)["state"]
        loss(model).backward()
        assert get_optimizer_state_dict(model, SGD(model.parameters(), lr=0.1, momentum=0.9))["state"] is not None
        first.step()

    assert begun_by(training) == ["first"]


def test_a_step_that_a_scaler_skips_is_none() -> None:
    def training(model: torch.nn.Module, first: Any, _second: Any) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        for factor in (1.0, float("inf"), 1.0):
            first.zero_grad()
            scaler.scale(loss(model) * factor).backward()
            scaler.step(first)
            scaler.update()

    assert begun_by(training) == ["first", "first"]


def test_an_optimizer_after_another_one_with_a_closure_is_part_of_its_step() -> None:
    def training(model: torch.nn.Module, first: Any, second: Any) -> None:
        for _ in range(2):
            first.step(lambda: loss(model).backward())
            second.step()

    assert begun_by(training) == ["first"] * 2


class Twice(SGD):
    """Steps as its base class does, which torch tells of each step, too."""

    def step(self, closure: Callable[[], None] | None = None) -> None:  # type: ignore[override]
        super().step(closure)
        super().step()


def test_a_step_of_a_base_class_is_part_of_the_step_that_calls_it() -> None:
    begun: list[Any] = []
    model = torch.nn.Linear(2, 1)
    SGD(model.parameters(), lr=0.1)  # torch has the steps of a class told when it first makes one
    outer = Twice(model.parameters(), lr=0.1)
    with at_each_step(begun.append):
        for _ in range(2):
            loss(model).backward()
            outer.step()
    assert begun == [outer] * 2


def test_after_a_step_that_raises_another_optimizer_is_counted() -> None:
    def training(model: torch.nn.Module, first: Any, second: Any) -> None:
        with pytest.raises(ZeroDivisionError):
            first.step(lambda: 1 / 0)
        for _ in range(2):
            loss(model).backward()
            second.step()

    assert begun_by(training) == ["first", "second", "second"]


class Around(torch.optim.Optimizer):
    """Steps another optimizer inside its own step, after a backward pass of its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Callable[[], None]) -> None:  # type: ignore[override]
        closure()
        self.inner.step()


def test_an_optimizer_inside_another_one_is_part_of_its_step() -> None:
    begun: list[Any] = []
    model = torch.nn.Linear(2, 1)
    outer = Around(SGD(model.parameters(), lr=0.1))
    with at_each_step(begun.append):
        outer.step(lambda: loss(model).backward())
        with pytest.raises(ZeroDivisionError):
            outer.step(lambda: 1 / 0)
        outer.step(lambda: loss(model).backward())
    assert begun == [outer] * 3
