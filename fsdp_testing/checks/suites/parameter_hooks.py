"""Hooks that users register on parameters: what they are given, when, and whether what they return counts."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.adapters.protocol import Setup
from fsdp_testing.cases.records import UNIT_ROUNDOFF, Case, Observe, RankObservation, ZeroGrad
from fsdp_testing.checks.suites.check import PLAIN_SGD, Place, Suite
from fsdp_testing.checks.suites.comm_hooks import expect_scaled
from fsdp_testing.checks.suites.schedules import micro_batch
from fsdp_testing.judging.case_runner import RunMode
from fsdp_testing.judging.checkers import remarks
from fsdp_testing.judging.checkers.remarks import Remark, RemarkedObservation
from fsdp_testing.oracle import models
from fsdp_testing.oracle.execute import RankProgram
from fsdp_testing.oracle.setup import setup_in_world
from fsdp_testing.ranks.pool import Failed
from fsdp_testing.ranks.pool.world import current_world

FACTOR = 2.0
"""What the tensor hook multiplies the gradient by."""

Seen = dict[tuple[int, str], list[torch.Tensor | None]]
"""What hooks saw, by operation and parameter."""


def run_hooked_parameters(
    adapter: Adapter, case: Case, observe_all: bool, accumulated: bool
) -> RankObservation | Failed:
    """Run the case with a hook on every parameter, and remark what the hooks saw that is not as it must be.

    Args:
        adapter: The implementation.
        case: Its last operation reduces gradients; no operation steps.
        observe_all: As in `run_case`.
        accumulated: Hooks run once the gradient is accumulated, and look at `.grad`; else they are given the gradient.

    Collectives: those of the implementation; every rank of the world runs the same call.
    """
    rank, seen = current_world().rank, Seen()

    def after(fqn: str, parameter: torch.Tensor) -> None:
        grad = parameter.grad
        seen.setdefault((program.index, fqn), []).append(None if grad is None else grad.detach().clone())

    def given(fqn: str, gradient: torch.Tensor) -> torch.Tensor:
        seen.setdefault((program.index, fqn), []).append(gradient.detach().clone())
        return gradient * FACTOR

    def wrap(module: nn.Module, setup: Setup) -> nn.Module:
        model = adapter.wrap(module, setup)
        for fqn, parameter in adapter.named_parameters(model):
            if accumulated:
                parameter.register_post_accumulate_grad_hook(partial(after, fqn))
            else:
                parameter.register_hook(partial(given, fqn))
        return model

    program = RankProgram(case, replace(adapter, wrap=wrap), rank, setup_in_world)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        observed = program.run(observe_all=observe_all)
        if observed.error is not None:
            return Failed(observed)
        wrong = _not_the_reduced(adapter, program, seen) if accumulated else _not_the_own(case, rank, seen)
        found = list(wrong)
        adapter.finish(program.model)
    return observed.extended(RemarkedObservation, remarks=tuple(found))


def _not_the_reduced(adapter: Adapter, program: RankProgram, seen: Seen) -> Iterator[Remark]:
    backwards = [index for index, one in enumerate(program.case.program) if one.runs_backward]
    for fqn, parameter in adapter.named_parameters(program.model):
        if not parameter.numel() or parameter.grad is None:
            continue
        for index in backwards:
            calls = seen.get((index, fqn), [])
            if len(calls) != 1 or calls[0] is None:
                what = "was not called" if not calls else "found no gradient"
                text = f"the hook on {fqn} {what if len(calls) < 2 else f'was called {len(calls)} times'}"
                yield Remark(index, "calls of parameter hooks", text)
            elif index == backwards[-1] and not torch.equal(calls[0], parameter.grad):
                yield Remark(
                    index, "calls of parameter hooks", f"the hook on {fqn} found another gradient than the end"
                )


def _not_the_own(case: Case, rank: int, seen: Seen) -> Iterator[Remark]:
    model = models.build_model(case)
    for index, operation in enumerate(case.program):
        for batch in operation.batches():
            model.zero_grad()
            inputs = models.make_inputs(case, batch, rank)
            models.forward(model, case, batch, rank, inputs).loss.backward()
            largest = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
            bound = 64 * UNIT_ROUNDOFF[case.model.dtype] * largest  # inner products in another order
            for fqn, parameter in model.named_parameters():
                calls = seen.get((index, fqn), [])
                own = [call for call in calls if call is not None and call.shape == parameter.shape]
                assert parameter.grad is not None
                if len(calls) != 1 or not own or float((own[0] - parameter.grad).abs().max()) > bound:
                    text = f"the hook on {fqn} was not called once with this rank's own gradient ({len(calls)} calls)"
                    yield Remark(index, "calls of parameter hooks", text)


def _case(place: Place) -> Iterable[Case]:
    # No step: gradients are a function of the initial values, so the rank's own are known without the other ranks.
    for model in ("mlp", "uneven"):
        yield place.case(model, micro_batch(0), Observe(), ZeroGrad(), micro_batch(1), optimizer=PLAIN_SGD)


SUITE = Suite()

SUITE.add(
    "parameter_hooks.own_gradient",
    "A hook on a parameter is given this rank's own gradient before it is reduced, and what it returns counts.",
    _case,
    source="torch.Tensor.register_hook",
    needs={"tensor_hooks"},
    mode=RunMode(
        run_hooked_parameters,
        (False,),
        expect_scaled,
        (FACTOR,),
        review=remarks.review,
        besides="what the hooks on parameters return",
    ),
)
SUITE.add(
    "parameter_hooks.after_accumulation",
    "A hook that runs after accumulation finds the reduced gradient in `.grad`, once in each backward.",
    _case,
    source="torch.Tensor.register_post_accumulate_grad_hook; torchrec PR 4268",
    needs={"accumulation_hooks"},
    mode=RunMode(run_hooked_parameters, (True,), review=remarks.review),
)
