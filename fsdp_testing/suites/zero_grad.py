"""zero_grad in both forms, anywhere in the schedule."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_testing.records import Case, Observe, Step, ZeroGrad
from fsdp_testing.suites.check import ADAMW, Check, Place
from fsdp_testing.suites.schedules import forward, iterations, micro_batch


def _both(place: Place) -> Iterable[Case]:
    for to_none in (True, False):
        program = [op for seed in range(3) for op in (micro_batch(seed), Step(), ZeroGrad(to_none), Observe())]
        yield place.case("mlp", *program, optimizer=ADAMW)


def _before(place: Place) -> Iterable[Case]:
    for to_none in (True, False):
        yield place.case(
            "mlp", ZeroGrad(to_none), Observe(), micro_batch(0), Step(), ZeroGrad(to_none), ZeroGrad(not to_none)
        )
        yield place.case("uneven", ZeroGrad(to_none), ZeroGrad(to_none), micro_batch(0), Step())


def _instead_of_step(place: Place) -> Iterable[Case]:
    for to_none in (True, False):
        yield place.case(
            "mlp", micro_batch(0), ZeroGrad(to_none), micro_batch(1), Step(), ZeroGrad(to_none), micro_batch(2)
        )


def _between(place: Place) -> Iterable[Case]:
    for to_none in (True, False):
        program = (
            micro_batch(0),
            Step(),
            forward(1),
            ZeroGrad(to_none),
            forward(2, "train"),
            ZeroGrad(to_none),
            *iterations(1, 3),
        )
        yield place.case("mlp", *program)


def _mixed(place: Place) -> Iterable[Case]:
    forms = (True, False, False, True, False)
    program = [op for seed, form in enumerate(forms) for op in (micro_batch(seed), Step(), ZeroGrad(form))]
    yield place.case("deep_nest", *program, optimizer=ADAMW)


def _step_on_zeros(place: Place) -> Iterable[Case]:
    # With momentum and weight decay a gradient of zeros moves parameters and None does not.
    for to_none in (True, False):
        yield place.case("mlp", *iterations(1), micro_batch(1), ZeroGrad(to_none), Step(), Step(), optimizer=ADAMW)


CHECKS = (
    Check(
        "zero_grad.both_forms",
        "Gradients are None, or zeros, after zero_grad, and training goes on as in one process.",
        "torch.optim.Optimizer.zero_grad",
        _both,
    ),
    Check("zero_grad.before_first_backward", "Clearing what is not there changes nothing.", "torch.optim", _before),
    Check(
        "zero_grad.discards",
        "A gradient that is cleared before the step leaves no trace.",
        "torch.optim",
        _instead_of_step,
    ),
    Check(
        "zero_grad.between_forwards",
        "Clearing between forward passes changes nothing else.",
        "torch.optim",
        _between,
        frozenset({"forward_only"}),
    ),
    Check("zero_grad.mixed_forms", "The form may change from iteration to iteration.", "torch.optim", _mixed),
    Check(
        "zero_grad.then_step",
        "A step on zeros decays and moves by momentum; a step on None does nothing.",
        "torch.optim.AdamW",
        _step_on_zeros,
    ),
)
