"""Forward, backward, step: several iterations on inputs that differ between ranks."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_testing.checkers.comparison import Comparison
from fsdp_testing.records import BuildOptimizer, Case, Observe, OptimizerSpec, SetLr, Step, ZeroGrad
from fsdp_testing.suites.check import ADAMW, MOMENTUM, PLAIN_SGD, Check, Place
from fsdp_testing.suites.schedules import iterations, micro_batch, micro_batches

_PAPER = "PyTorch FSDP, VLDB 2023, section 3.2"


def _sgd(place: Place) -> Iterable[Case]:
    for model in ("mlp", "deep_nest", "embedding"):
        yield place.case(model, *iterations(4), optimizer=MOMENTUM)
    nesterov = OptimizerSpec("sgd", {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1})
    yield place.case("mlp", *iterations(4), optimizer=nesterov)


def _adamw(place: Place) -> Iterable[Case]:
    for model in ("mlp", "deep_nest", "embedding"):
        yield place.case(model, *iterations(4), optimizer=ADAMW)


def _gradients(place: Place) -> Iterable[Case]:
    for model in ("mlp", "deep_nest", "uneven"):
        yield place.case(model, micro_batch(0), Observe("gradients"), Step(), ZeroGrad(), micro_batch(1))


def _bitwise(place: Place) -> Iterable[Case]:
    for dtype in ("float64", "float32"):
        for model in ("mlp", "uneven"):
            yield place.case(model, *iterations(2), micro_batch(9), optimizer=ADAMW, dtype=dtype)


def _lr(place: Place) -> Iterable[Case]:
    program = (*iterations(2), SetLr(0.2), *iterations(2, first=2), SetLr(0.0), *iterations(1, first=4))
    yield place.case("mlp", *program)


def _late(place: Place) -> Iterable[Case]:
    yield place.case("mlp", micro_batch(0), ZeroGrad(), BuildOptimizer(), *iterations(2, first=1), optimizer=ADAMW)
    yield place.case("mlp", micro_batch(0), BuildOptimizer(), Step(), ZeroGrad(), *iterations(1, first=1))
    yield place.case("mlp", BuildOptimizer(), *iterations(2), BuildOptimizer(), *iterations(2, first=2))


def _magnitudes(place: Place) -> Iterable[Case]:
    program = [op for seed, scale in enumerate((1.0, 10.0, 0.01)) for op in iterations(1, first=seed, scale=scale)]
    yield place.case("mlp", *program, optimizer=PLAIN_SGD)


def _uneven_batches(place: Place) -> Iterable[Case]:
    yield place.case("mlp", *iterations(2, rows=(5, 2, 3)))
    yield place.case("deep_nest", *iterations(2, rows=(1, 7)))


def _empty_batches(place: Place) -> Iterable[Case]:
    yield place.case("mlp", *iterations(1), *iterations(2, first=1, rows=(4, 0)))
    yield place.case("mlp", *iterations(1, rows=(0, 3)), *iterations(1, first=1))


def _float32(place: Place) -> Iterable[Case]:
    yield place.case("mlp", *iterations(3), optimizer=ADAMW, dtype="float32")
    yield place.case("deep_nest", *iterations(3), dtype="float32")


def _repeated_backward(place: Place) -> Iterable[Case]:
    yield place.case("mlp", *micro_batches(0, 0), Step(), optimizer=PLAIN_SGD)


CHECKS = (
    Check("training.sgd_momentum", "SGD with momentum trains as in one process.", _PAPER, _sgd),
    Check("training.adamw_weight_decay", "AdamW with weight decay trains as in one process.", _PAPER, _adamw),
    Check(
        "training.gradients_are_means",
        "After backward each gradient is the mean over ranks: not the sum, not a rank's own.",
        "pytorch PR 89915",
        _gradients,
    ),
    Check(
        "training.each_operation_exactly",
        "From its own state every operation gives the replayed bits (sums of more than two ranks: any order).",
        "IEEE 754: two summands commute",
        _bitwise,
        comparison=Comparison(lockstep=True),
    ),
    Check(
        "training.learning_rate_changes",
        "A learning rate set between iterations takes effect, zero included.",
        _PAPER,
        _lr,
    ),
    Check(
        "training.late_optimizer",
        "An optimizer built after some iterations, or built anew, trains as in one process.",
        _PAPER,
        _late,
        frozenset({"late_optimizer"}),
    ),
    Check(
        "training.magnitudes",
        "Iterations whose inputs differ by powers of ten keep their weight.",
        "Megatron-LM PR 3023",
        _magnitudes,
    ),
    Check(
        "training.uneven_batches",
        "Ranks with different numbers of rows average their gradients with equal weight.",
        "torch.nn.parallel.DistributedDataParallel, note on uneven inputs",
        _uneven_batches,
        frozenset({"uneven_batches"}),
    ),
    Check(
        "training.empty_batches",
        "A rank without rows takes part with a gradient of zeros.",
        "torch.distributed.algorithms.join: the case without joining",
        _empty_batches,
        frozenset({"uneven_batches"}),
    ),
    Check("training.float32", "Training in float32 stays within float32's roundings.", _PAPER, _float32),
    Check(
        "training.same_batch_twice",
        "The same micro-batch twice gives twice the gradient.",
        _PAPER,
        _repeated_backward,
        frozenset({"accumulate_without_no_sync"}),
    ),
)
