"""zero_grad in both forms, anywhere in the schedule."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_testing.cases.records import Case, Observe, Step, ZeroGrad
from fsdp_testing.checks.suites.check import ADAMW, Place, Suite
from fsdp_testing.checks.suites.schedules import forward, iteration, micro_batch

SUITE = Suite()


@SUITE.check("zero_grad.both_forms", source="torch.optim.Optimizer.zero_grad")
def _both(place: Place) -> Iterable[Case]:
    """Gradients are None, or zeros, after zero_grad, and training goes on as in one process."""
    for to_none in (True, False):
        program = [op for seed in range(3) for op in (micro_batch(seed), Step(), ZeroGrad(to_none), Observe())]
        yield place.case("mlp", *program, optimizer=ADAMW)


@SUITE.check("zero_grad.before_first_backward", source="torch.optim")
def _before(place: Place) -> Iterable[Case]:
    """Clearing what is not there changes nothing."""
    for to_none in (True, False):
        yield place.case(
            "mlp", ZeroGrad(to_none), Observe(), micro_batch(0), Step(), ZeroGrad(to_none), ZeroGrad(not to_none)
        )
        yield place.case("uneven", ZeroGrad(to_none), ZeroGrad(to_none), micro_batch(0), Step())


@SUITE.check("zero_grad.discards", source="torch.optim")
def _instead_of_step(place: Place) -> Iterable[Case]:
    """A gradient that is cleared before the step leaves no trace."""
    for to_none in (True, False):
        yield place.case(
            "mlp", micro_batch(0), ZeroGrad(to_none), micro_batch(1), Step(), ZeroGrad(to_none), micro_batch(2)
        )


@SUITE.check("zero_grad.between_forwards", source="torch.optim")
def _between(place: Place) -> Iterable[Case]:
    """Clearing between forward passes changes nothing else."""
    for to_none in (True, False):
        program = (micro_batch(0), Step(), forward(1), ZeroGrad(to_none), forward(2, "train"), ZeroGrad(to_none))
        yield place.case("mlp", *program, *iteration(3))


@SUITE.check("zero_grad.mixed_forms", source="torch.optim")
def _mixed(place: Place) -> Iterable[Case]:
    """The form may change from iteration to iteration."""
    forms = (True, False, False, True, False)
    program = [op for seed, form in enumerate(forms) for op in (micro_batch(seed), Step(), ZeroGrad(form))]
    yield place.case("deep_nest", *program, optimizer=ADAMW)


@SUITE.check("zero_grad.then_step", source="torch.optim.AdamW")
def _step_on_zeros(place: Place) -> Iterable[Case]:
    """A step on zeros decays and moves by momentum; a step on None does nothing."""
    # With momentum and weight decay a gradient of zeros moves parameters and None does not.
    for to_none in (True, False):
        yield place.case("mlp", *iteration(0), micro_batch(1), ZeroGrad(to_none), Step(), Step(), optimizer=ADAMW)
