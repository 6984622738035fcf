"""DDP as a second oracle: offload, no_sync and mixed precision give what DDP gives on the same ranks.

In mixed precision DDP trains full parameters that are cast in each forward, and reduces in the dtype asked for through
its own communication hook: the plain recipe, without FSDP's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.adapters.protocol import Precision, Setup
from fsdp_testing.adapters.torch import ddp as torch_ddp
from fsdp_testing.cases.records import Case, MixedPrecisionSpec, Observe, RankObservation, Step, WrappingPlan, ZeroGrad
from fsdp_testing.checks.suites.check import ADAMW, PLAIN_SGD, Place, Suite
from fsdp_testing.checks.suites.schedules import accumulated, iteration, iterations, micro_batch
from fsdp_testing.judging.case_runner import RunMode
from fsdp_testing.judging.checkers.second_oracle import PairedObservation, review_pair
from fsdp_testing.oracle import models, rank_jobs
from fsdp_testing.oracle.comparison import Comparison
from fsdp_testing.oracle.execute import RankProgram
from fsdp_testing.ranks.pool import Failed


class LowPrecision(nn.Module):
    """A module whose parameters are stored in full and computed with in `dtype`."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = inner
        self.dtype = dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Cast parameters and inputs, then run the module."""
        cast, inputs, options = models.cast_floats((dict(self.inner.named_parameters()), args, kwargs), self.dtype)
        return torch.func.functional_call(self.inner, cast, inputs, options)


def _reduce_in(wire: torch.dtype, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP's hook: the bucket's mean over the ranks, reduced in `wire`. Collectives: one all-reduce; every rank calls."""
    total = bucket.buffer().to(wire)
    dist.all_reduce(total)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(total.div_(dist.get_world_size()).to(bucket.buffer().dtype))
    return done


def ddp(module: nn.Module, setup: Setup) -> nn.Module:
    """DDP around the module, in the setup's precision. Collectives: those of DDP's construction; every rank calls."""
    precision = setup.precision
    if precision == Precision():
        return torch_ddp.wrap(module, setup)
    inner = module if precision.param_dtype is None else LowPrecision(module, precision.param_dtype)
    model = torch_ddp.wrap(inner, replace(setup, precision=Precision()))
    if precision.on_the_wire is not None and isinstance(model, DistributedDataParallel):
        # DDP reads annotations, and wants types where postponed ones are text: a lambda has none.
        model.register_comm_hook(precision.on_the_wire, lambda wire, bucket: _reduce_in(wire, bucket))  # noqa: PLW0108 - see above
    return model


def _named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(fqn.removeprefix("module.").removeprefix("inner."), p) for fqn, p in model.named_parameters()]


SECOND = Adapter.of(replace(torch_ddp.IMPLEMENTATION, wrap=ddp, named_parameters=_named_parameters))
"""DDP, in any precision."""


def run_beside_ddp(adapter: Adapter, case: Case, observe_all: bool) -> RankObservation | Failed:
    """Run the case with the implementation, and then with DDP.

    Collectives: those of both; every rank of the world runs the same call.
    """
    plain = replace(case, strategy="no_shard", wrapping=WrappingPlan(), cpu_offload=False)
    seen = rank_jobs.run_case(adapter, case, observe_all)
    if isinstance(seen, Failed):
        return seen
    with rank_jobs.no_warnings():
        other = RankProgram(plain, SECOND, seen.rank).run(observe_all=observe_all)
    return seen.extended(PairedObservation, other=other, gradients=adapter.observes_gradients)


_PRECISIONS = (
    MixedPrecisionSpec("bfloat16"),
    MixedPrecisionSpec("float16"),
    MixedPrecisionSpec("bfloat16", "float32"),
    MixedPrecisionSpec(None, "bfloat16"),
)
_PAIR = RunMode(run_beside_ddp, review=review_pair)

SUITE = Suite(source="torch.nn.parallel.DistributedDataParallel on the same ranks", mode=_PAIR)


@SUITE.check("beside_ddp.no_sync")
def _accumulated(place: Place) -> Iterable[Case]:
    """Local micro-batches and a reduced one give what DDP gives."""
    program = (*accumulated(0, 1, 2), Observe(), Step(), ZeroGrad(), *accumulated(3, 4), Step())
    yield place.case("uneven", *program, optimizer=ADAMW)


@SUITE.check("beside_ddp.mixed_precision", comparison=Comparison(lockstep=True))
def _lowered(place: Place) -> Iterable[Case]:
    """A gradient computed and reduced in low precision is DDP's, cast for cast."""
    # One reduction, from equal values: what two low precisions make of a difference in the last bit is bounded by nothing.
    for precision in _PRECISIONS:
        yield place.case("mlp", micro_batch(0), Observe(), dtype="float32", optimizer=PLAIN_SGD, precision=precision)


@SUITE.check("beside_ddp.offload")
def _offloaded(place: Place) -> Iterable[Case]:
    """Offloaded parameters train as DDP's do."""
    yield replace(place.case("uneven", *iterations(3), optimizer=ADAMW), cpu_offload=True)


@SUITE.check("beside_ddp.offload_no_sync")
def _offloaded_accumulation(place: Place) -> Iterable[Case]:
    """Offloaded gradients accumulate as DDP's do."""
    program = (*accumulated(0, 1), Observe(), Step(), ZeroGrad(), *iteration(2))
    yield replace(place.case("mlp", *program), cpu_offload=True)
