"""Forward, backward, step: several iterations on inputs that differ between ranks."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_testing.cases.records import BuildOptimizer, Case, Observe, OptimizerSpec, SetLr, Step, ZeroGrad
from fsdp_testing.checks.suites.check import ADAMW, MOMENTUM, PLAIN_SGD, Place, Suite
from fsdp_testing.checks.suites.schedules import forward, iteration, iterations, micro_batch, micro_batches
from fsdp_testing.oracle.comparison import Comparison

SUITE = Suite(source="PyTorch FSDP, VLDB 2023, section 3.2")


@SUITE.check("training.sgd_momentum")
def _sgd(place: Place) -> Iterable[Case]:
    """SGD with momentum trains as in one process."""
    for model in ("mlp", "deep_nest", "embedding"):
        yield place.case(model, *iterations(4), optimizer=MOMENTUM)
    nesterov = OptimizerSpec("sgd", {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1})
    yield place.case("mlp", *iterations(4), optimizer=nesterov)


@SUITE.check("training.adamw_weight_decay")
def _adamw(place: Place) -> Iterable[Case]:
    """AdamW with weight decay trains as in one process."""
    for model in ("mlp", "deep_nest", "embedding"):
        yield place.case(model, *iterations(4), optimizer=ADAMW)


@SUITE.check("training.gradients_are_means", source="pytorch PR 89915")
def _gradients(place: Place) -> Iterable[Case]:
    """After backward each gradient is the mean over ranks: not the sum, not a rank's own."""
    for model in ("mlp", "deep_nest", "uneven"):
        yield place.case(model, micro_batch(0), Observe("gradients"), Step(), ZeroGrad(), micro_batch(1))


@SUITE.check(
    "training.each_operation_exactly", source="IEEE 754: two summands commute", comparison=Comparison(lockstep=True)
)
def _bitwise(place: Place) -> Iterable[Case]:
    """From its own state every operation gives the replayed bits (sums of more than two ranks: any order)."""
    for dtype in ("float64", "float32"):
        for model in ("mlp", "uneven"):
            yield place.case(model, *iterations(2), micro_batch(9), optimizer=ADAMW, dtype=dtype)


@SUITE.check(
    "training.changed_in_forward", source="torch.nn.Module: parameters are the module's own", needs={"forward_edits"}
)
def _changed_in_forward(place: Place) -> Iterable[Case]:
    """Modules that clip their own weights in forward train as in one process, and so they do in evaluation."""
    for optimizer in (MOMENTUM, ADAMW):
        yield place.case("self_clipping", *iterations(3), forward(7, "no_grad"), *iteration(4), optimizer=optimizer)


@SUITE.check("training.learning_rate_changes")
def _lr(place: Place) -> Iterable[Case]:
    """A learning rate set between iterations takes effect, zero included."""
    program = (*iterations(2), SetLr(0.2), *iterations(2, first=2), SetLr(0.0), *iteration(4))
    yield place.case("mlp", *program)


@SUITE.check("training.late_optimizer")
def _late(place: Place) -> Iterable[Case]:
    """An optimizer built after some iterations, or built anew, trains as in one process."""
    yield place.case("mlp", micro_batch(0), ZeroGrad(), BuildOptimizer(), *iterations(2, first=1), optimizer=ADAMW)
    yield place.case("mlp", micro_batch(0), BuildOptimizer(), Step(), ZeroGrad(), *iteration(1))
    yield place.case("mlp", BuildOptimizer(), *iterations(2), BuildOptimizer(), *iterations(2, first=2))


@SUITE.check("training.magnitudes", source="Megatron-LM PR 3023")
def _magnitudes(place: Place) -> Iterable[Case]:
    """Iterations whose inputs differ by powers of ten keep their weight."""
    program = [op for seed, scale in enumerate((1.0, 10.0, 0.01)) for op in iterations(1, first=seed, scale=scale)]
    yield place.case("mlp", *program, optimizer=PLAIN_SGD)


@SUITE.check("training.uneven_batches", source="torch.nn.parallel.DistributedDataParallel, note on uneven inputs")
def _uneven_batches(place: Place) -> Iterable[Case]:
    """Ranks with different numbers of rows average their gradients with equal weight."""
    yield place.case("mlp", *iterations(2, rows=(5, 2, 3)))
    yield place.case("deep_nest", *iterations(2, rows=(1, 7)))


@SUITE.check("training.empty_batches", source="torch.distributed.algorithms.join: the case without joining")
def _empty_batches(place: Place) -> Iterable[Case]:
    """A rank without rows takes part with a gradient of zeros."""
    yield place.case("mlp", *iteration(0), *iterations(2, first=1, rows=(4, 0)))
    yield place.case("mlp", *iterations(1, rows=(0, 3)), *iteration(1))


@SUITE.check("training.float32")
def _float32(place: Place) -> Iterable[Case]:
    """Training in float32 stays within float32's roundings."""
    yield place.case("mlp", *iterations(3), optimizer=ADAMW, dtype="float32")
    yield place.case("deep_nest", *iterations(3), dtype="float32")


@SUITE.check("training.same_batch_twice", needs={"accumulate_without_no_sync"})
def _repeated_backward(place: Place) -> Iterable[Case]:
    """The same micro-batch twice gives twice the gradient."""
    yield place.case("mlp", *micro_batches(0, 0), Step(), optimizer=PLAIN_SGD)
