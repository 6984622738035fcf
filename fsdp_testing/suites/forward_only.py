"""Forward passes that no backward follows, in every mode, at any point of the schedule."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_testing.records import Case, Observe, Step, ZeroGrad
from fsdp_testing.suites.check import Builder, Check, Place, Suite
from fsdp_testing.suites.schedules import forward, iterations, micro_batch

_NEEDS = frozenset({"forward_only"})


def _everywhere(mode: str) -> Builder:
    def build(place: Place) -> Iterable[Case]:
        yield place.case("mlp", forward(10, mode), *iterations(2), forward(11, mode))
        program = (
            micro_batch(0),
            forward(10, mode),
            Step(),
            forward(11, mode),
            ZeroGrad(),
            forward(12, mode),
            *iterations(1, first=1),
        )
        yield place.case("mlp", *program)
        yield place.case("deep_nest", *program)  # its root holds parameters, and roots have rules of their own
        yield place.case("deep_nest", *iterations(1), forward(10, mode), forward(11, mode), *iterations(2, first=1))

    return build


SUITE = Suite()


for mode, words, source in (
    ("train", "in training mode whose output is dropped", "pytorch issue 83107"),
    ("eval", "in evaluation mode with gradients on", "pytorch PR 110139"),
    ("no_grad", "under no_grad in evaluation mode", "pytorch PR 110139"),
    ("inference", "under inference_mode", "torch.inference_mode"),
):
    SUITE.add(
        Check(
            f"forward_only.{mode}",
            f"Forward passes {words} give the right output and disturb nothing.",
            source,
            _everywhere(mode),
            _NEEDS | ({"inference_mode"} if mode == "inference" else set()),
        )
    )


@SUITE.check("forward_only.modes_mixed", source="pytorch PR 110139", needs=_NEEDS)
def _modes_mixed(place: Place) -> Iterable[Case]:
    """Modes may change from pass to pass."""
    modes = ("eval", "train", "no_grad", "eval", "train")
    program = [op for seed, mode in enumerate(modes) for op in (forward(20 + seed, mode), *iterations(1, first=seed))]
    yield place.case("mlp", *program)


@SUITE.check("forward_only.keeps_gradients", source="pytorch PR 110139", needs=_NEEDS)
def _keeps_state(place: Place) -> Iterable[Case]:
    """Gradients that wait for a step survive forward passes."""
    program = (
        micro_batch(0),
        Observe(),
        forward(1),
        forward(2, "no_grad"),
        forward(3, "train"),
        Observe(),
        Step(),
        Observe(),
    )
    yield place.case("mlp", *program)


@SUITE.check("forward_only.batch_norm", source="torch.nn.BatchNorm1d", needs=_NEEDS | {"buffers"})
def _batch_norm(place: Place) -> Iterable[Case]:
    """Evaluation uses the statistics that training left, and leaves them."""
    yield place.case(
        "batch_norm", *iterations(2), forward(10), forward(11, "no_grad"), *iterations(1, first=2), forward(12)
    )
