"""Forward passes that no backward follows, in every mode, at any point of the schedule."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from fsdp_testing.cases.records import Case, Observe, Step, ZeroGrad
from fsdp_testing.checks.suites.check import Place, Suite
from fsdp_testing.checks.suites.schedules import forward, iteration, iterations, micro_batch


def _everywhere(mode: str, place: Place) -> Iterable[Case]:
    first, second, third = (forward(seed, mode) for seed in (10, 11, 12))
    yield place.case("mlp", first, *iterations(2), second)
    program = (micro_batch(0), first, Step(), second, ZeroGrad(), third, *iteration(1))
    yield place.case("mlp", *program)
    yield place.case("deep_nest", *program)  # its root holds parameters, and roots have rules of their own
    yield place.case("deep_nest", *iteration(0), first, second, *iterations(2, first=1))


SUITE = Suite()

for mode, words, source in (
    ("train", "in training mode whose output is dropped", "pytorch issue 83107"),
    ("eval", "in evaluation mode with gradients on", "pytorch PR 110139"),
    ("no_grad", "under no_grad in evaluation mode", "pytorch PR 110139"),
    ("inference", "under inference_mode", "torch.inference_mode"),
):
    SUITE.add(
        f"forward_only.{mode}",
        f"Forward passes {words} give the right output and disturb nothing.",
        partial(_everywhere, mode),
        source=source,
    )


@SUITE.check("forward_only.modes_mixed", source="pytorch PR 110139")
def _modes_mixed(place: Place) -> Iterable[Case]:
    """Modes may change from pass to pass."""
    modes = ("eval", "train", "no_grad", "eval", "train")
    program = [op for seed, mode in enumerate(modes) for op in (forward(20 + seed, mode), *iterations(1, first=seed))]
    yield place.case("mlp", *program)


@SUITE.check("forward_only.keeps_gradients", source="pytorch PR 110139")
def _keeps_state(place: Place) -> Iterable[Case]:
    """Gradients that wait for a step survive forward passes."""
    between = (forward(1), forward(2, "no_grad"), forward(3, "train"))
    yield place.case("mlp", micro_batch(0), Observe(), *between, Observe(), Step(), Observe())


@SUITE.check("forward_only.batch_norm", source="torch.nn.BatchNorm1d")
def _batch_norm(place: Place) -> Iterable[Case]:
    """Evaluation uses the statistics that training left, and leaves them."""
    yield place.case("batch_norm", *iterations(2), forward(10), forward(11, "no_grad"), *iteration(2), forward(12))
