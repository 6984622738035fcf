"""Backwards that are not one backward of the wrapper's last forward: a second one, one of gradients, one elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from fsdp_testing.cases.operations import UnusualBackward
from fsdp_testing.cases.records import Batch, Case, Observe, Step, ZeroGrad
from fsdp_testing.checks.suites.check import PLAIN_SGD, Place, Suite
from fsdp_testing.checks.suites.schedules import iteration, micro_batch

SUITE = Suite()


def _cases(form: str, place: Place) -> Iterable[Case]:
    for model in ("mlp", "deep_nest"):
        program = (UnusualBackward(Batch(0), form), Observe(), Step(), ZeroGrad(), micro_batch(1), Observe())
        yield place.case(model, *program, optimizer=PLAIN_SGD)


for name, meaning, source, needs in (
    ("twice", "A second backward through a kept graph is reduced too.", "pytorch issue 106637", {"accumulate_without_no_sync"}),
    ("penalty", "A loss made of gradients has the gradient that one process computes.", "pytorch issue 172543", set()),
    ("after_no_sync", "Whether a backward is reduced depends on where it runs, not its forward.", "pytorch issue 47260", set()),
    ("inputs", "A backward that names the parameters gives each the gradient of one process.", "torch.autograd.backward", set()),
    ("one_input", "A backward that names one parameter gives it its gradient, and no other one.", "torch.autograd.backward",
     {"unused_gradient_is_none"}),
    ("inner", "A forward of the module inside the wrapper is no way around the reduction.", "torch.nn.parallel", set()),
):  # fmt: skip
    SUITE.add(f"backward.{name}", meaning, partial(_cases, name), source=source, needs=needs)


@SUITE.check("backward.outdated", source="torch.autograd: saved tensors and in-place operations")
def _outdated(place: Place) -> Iterable[Case]:
    """A backward whose values a step has changed since forward is refused on every rank, as one process refuses it."""
    for model in ("mlp", "deep_nest"):
        # From before the first step, and later; nothing follows, which a failed backward need not allow.
        yield place.case(model, micro_batch(0), UnusualBackward(Batch(1), "outdated"), optimizer=PLAIN_SGD)
        program = (*iteration(0), micro_batch(1), UnusualBackward(Batch(2), "outdated"))
        yield place.case(model, *program, optimizer=PLAIN_SGD)
