"""Clipping gradients that are not finite: the norm says so on every rank, and so does an error where it is asked for."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fsdp_testing.adapters.adapter import Adapter, Model
from fsdp_testing.cases.records import Case, Observe, RankObservation
from fsdp_testing.checks.suites.check import Place, Suite
from fsdp_testing.checks.suites.schedules import micro_batch
from fsdp_testing.judging.case_runner import RunMode
from fsdp_testing.judging.checkers import remarks
from fsdp_testing.judging.checkers.remarks import Remark, RemarkedObservation
from fsdp_testing.oracle.comparison import Comparison
from fsdp_testing.oracle.execute import RankProgram
from fsdp_testing.oracle.setup import setup_in_world
from fsdp_testing.ranks.pool import Failed
from fsdp_testing.ranks.pool.world import current_world

_NORMS = (2.0, 1.0, math.inf)
_QUANTITY = "clipping"


def run_poisoned(
    adapter: Adapter, case: Case, observe_all: bool, value: float, error: bool
) -> RankObservation | Failed:
    """Run the case, put `value` into one gradient, and clip by each norm; remark what is not as in one process.

    Args:
        adapter: The implementation.
        case: Ends with gradients.
        observe_all: As in `run_case`.
        value: Not finite.
        error: Ask for an error where the norm is not finite.

    Collectives: those of the implementation; every rank of the world runs the same call.
    """
    program = RankProgram(case, adapter, current_world().rank, setup_in_world)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seen = program.run(observe_all=observe_all)
        if seen.error is not None:
            return Failed(seen)
        grads = _local_gradients(adapter, program.model)
        before = [grad.clone() for _, grad in grads]
        found: list[Remark] = []
        wrong = partial(_wrong_error, before) if error else partial(_wrong_norm, value)
        for norm_type in _NORMS:
            for (_, grad), kept in zip(grads, before):
                grad.copy_(kept)
            for starts, grad in grads[:1]:
                grad.view(-1)[:1].fill_(value) if starts else None
            try:
                said = list(wrong(adapter, program.model, norm_type, grads))
            except Exception as raised:  # noqa: BLE001 - whatever a foreign implementation raises is a finding
                return Failed(replace(seen, error=program.record(raised)))
            found += [Remark(len(case.program), _QUANTITY, f"by the {norm_type}-norm: {text}") for text in said]
        adapter.finish(program.model)
    return seen.extended(RemarkedObservation, remarks=tuple(found))


Gradients = list[tuple[bool, torch.Tensor]]


def _local_gradients(adapter: Adapter, model: Model) -> Gradients:
    """Return this rank's gradients, views, and of each whether it has the parameter's first element."""
    pieces = [piece for held in adapter.local_pieces(model).values() for piece in held if piece.grad is not None]
    return [(piece.start == 0 < piece.stop, piece.grad) for piece in pieces if piece.grad is not None]


def _wrong_norm(value: float, adapter: Adapter, model: Model, norm_type: float, grads: Gradients) -> Iterator[str]:
    norm = float(adapter.clip_grad_norm(model, 0.1, norm_type))
    if not (norm == value or (math.isnan(norm) and math.isnan(value))):
        yield f"a gradient is {value}, and the norm is {norm}"
    # One process multiplies every gradient by 0.1 / (norm + 1e-6): by zero, or by what is no number.
    kept = sum(int(((grad != 0) & grad.isfinite()).sum()) for _, grad in grads)
    if kept:
        yield f"a gradient is {value}, and {kept} elements are still finite and not zero, expected none"


def _wrong_error(
    before: list[torch.Tensor], adapter: Adapter, model: Model, norm_type: float, grads: Gradients
) -> Iterator[str]:
    clip: Any = adapter.clip_grad_norm
    try:
        norm = clip(model, 0.1, norm_type, error_if_nonfinite=True)
    except RuntimeError:
        changed = sum(int((grad.isfinite() & (grad != kept)).sum()) for (_, grad), kept in zip(grads, before))
        if changed:
            yield f"an error was raised after {changed} elements had been scaled"
    else:
        yield f"no error was raised, and the norm is {float(norm)}"


def _case(place: Place) -> Iterable[Case]:
    yield place.case("mlp", micro_batch(0), Observe(), dtype="float32")


SUITE = Suite(source="torch.nn.utils.clip_grad_norm_", comparison=Comparison(lockstep=True), needs={"clip_grad_norm"})

for name, meaning, value, error in (
    ("infinite", "An infinite gradient on one rank makes the norm infinite on every rank.", math.inf, False),
    ("not_a_number", "A gradient that is no number makes the norm none on every rank.", math.nan, False),
    ("error_if_nonfinite", "Where it is asked for every rank raises, and no gradient is scaled.", math.inf, True),
):
    mode = RunMode(run_poisoned, (value, error), review=remarks.review)
    SUITE.add(f"clipping.{name}", meaning, _case, needs={"error_if_nonfinite"} if error else (), mode=mode)
