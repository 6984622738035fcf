"""How is a finished batch judged? In a process of its own: the oracle replays, the screen clears, parity decides.

Runs in the single rank of a world of one, while the ranks are busy with the next batch.
"""

from __future__ import annotations

import functools
import math
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from fsdp_testing.campaign import stream
from fsdp_testing.campaign.batch import OUTLIVES, Watch
from fsdp_testing.campaign.stream import CaseRecord
from fsdp_testing.checkers import adoption, parity, promises
from fsdp_testing.checkers.comparison import Comparison
from fsdp_testing.checkers.divergence import Tally
from fsdp_testing.checkers.quantities import Expectation
from fsdp_testing.implementations import registry
from fsdp_testing.implementations.adapter import Adapter
from fsdp_testing.implementations.protocol import Division
from fsdp_testing.judging import screen
from fsdp_testing.judging.communication_budget import theory_of
from fsdp_testing.judging.signature import Signature, of_divergence, of_error, operation_kind
from fsdp_testing.programs import oracle
from fsdp_testing.programs.fitting import fitted
from fsdp_testing.programs.replay import Replay
from fsdp_testing.programs.setup import setup_of
from fsdp_testing.records import UNIT_ROUNDOFF, Case, Overrun, RankObservation, WorldSpec, WrappingPlan
from fsdp_testing.zoo import MODELS
from fsdp_testing.zoo.tree_legality import parameters

_ROUNDINGS_OF_A_PART = 64
"""Roundings of a part in a narrower dtype: its inner products, several times over."""


@dataclass(frozen=True, slots=True)
class CaseNote:
    """What the judge says of one case of a batch.

    Attributes:
        index: Place of the case in the batch.
        status: `passed`, `leaked` (right, but its model stays in memory), `suspect` (to be confirmed alone),
            `unfinished` (its observations are not complete),
            `unsupported` (the implementation said so itself), `unjudged` (the oracle or the adapter could not run it, or
            nothing was compared).
        reason: Why it is not `passed`.
        comparisons: Number of tensors compared.
        screened: It was cleared by the screen alone.
        signature: What the failure looks like.
        arcs: The way through the implementation's source, if it was recorded.
        overrun: The facts of a failure of kind `kept` or `excess`.
    """

    index: int
    status: str
    reason: str = ""
    comparisons: int = 0
    screened: bool = False
    signature: Signature | None = None
    arcs: frozenset[int] = frozenset()
    overrun: Overrun | None = None


def comparison_for(case: Case, adapter: Adapter) -> Comparison:
    """Returns the comparison that is fair for a case, given what the implementation claims."""
    return Comparison(
        lockstep=case.mixed_precision is not None,
        none_is_zero="unused_gradient_is_none" not in adapter.capabilities,
        gradients=adapter.observes_gradients,
        optimizer="optimizer_pieces" in adapter.capabilities,
        ignore=tuple(f"{module}.*" for module in case.wrapping.ignored),
    )


def judge_batch(name: str, cases: Sequence[Case], size: int, directory: str, watch: Watch) -> list[CaseNote]:
    """Judges every case of a batch of which all ranks told.

    Args:
        name: The implementation.
        cases: In the order in which they were run.
        size: Number of ranks.
        directory: Where their observations lie.
        watch: As given to `run_batch`.
    """
    adapter = _adapter(name)
    told: list[dict[int, CaseRecord]] = []
    for rank in range(size):
        # A later record of the same case tells of what was found after the batch, and is put beside the first.
        by_index: dict[int, CaseRecord] = {}
        for record in stream.read(directory, rank):
            known = by_index.get(record.index)
            by_index[record.index] = record if known is None else replace(known, leaks=known.leaks + record.leaks)
        told.append(by_index)
    return [_judge(adapter, index, fitted(case, adapter), told, watch) for index, case in enumerate(cases)]


@functools.cache
def _adapter(name: str) -> Adapter:
    return registry.load(name)


def _judge(adapter: Adapter, index: int, case: Case, told: list[dict[int, CaseRecord]], watch: Watch) -> CaseNote:
    records = [by_index[index] for by_index in told if index in by_index]
    if not records:
        return CaseNote(index, "unfinished")
    arcs = frozenset().union(*(record.arcs for record in records))
    try:
        note = _judge_records(adapter, case, records, len(told), watch)
    except Exception as error:  # noqa: BLE001 - a case that the oracle cannot run is told, never passed over
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        note = CaseNote(index, "unjudged", f"{type(error).__name__} at {where}: {error}")
    return replace(note, index=index, arcs=arcs)


def _judge_records(adapter: Adapter, case: Case, records: list[CaseRecord], size: int, watch: Watch) -> CaseNote:
    errors = [record.observation.error for record in records if record.observation.error is not None]
    innocent = [error for error in errors if error.innocent]
    if innocent:
        return CaseNote(0, "unjudged", f"{innocent[0].type_name}: {innocent[0].message.strip()}")
    if errors:
        first = min(errors, key=lambda error: error.index)
        if first.not_supported:
            return CaseNote(0, "unsupported", f"{first.type_name}: {first.message.strip()[:200]}")
        signature = of_error(case, first, everyone=len(errors) == size)
        earlier = (
            _compare(adapter, case, [record.observation for record in records], watch) if len(records) == size else None
        )
        if earlier is not None and earlier.status == "suspect":
            # What diverged before is the cause of what is raised after.
            return earlier
        return CaseNote(0, "suspect", f"{first.type_name}: {first.message.strip()[:300]}", signature=signature)
    if len(records) < size:
        return CaseNote(0, "unfinished")
    leaks = [leak for record in records for leak in record.leaks]
    if any(leak != OUTLIVES for leak in leaks):
        return CaseNote(0, "suspect", f"left behind: {leaks[0]}", signature=Signature("leaked", leaks[0].split(":")[0]))
    note = _compare(adapter, case, [record.observation for record in records], watch)
    if note.status == "passed" and _sequences_differ(records):
        what = "the ranks did not issue the same collectives"
        return CaseNote(0, "suspect", what, signature=Signature("desynchronised", "collectives"))
    if note.status == "passed":
        broken = promises.review(case, [record.accounts for record in records], theory_of(case))
        if broken is not None:
            signature = Signature(broken.kind, broken.quantity, operation_kind(case, broken.operation))
            return replace(note, status="suspect", reason=broken.sentence, signature=signature, overrun=broken)
    if note.status == "passed" and leaks:
        return replace(note, status="leaked", reason=leaks[0], signature=Signature("leaked", "model"))
    return note


def _sequences_differ(records: Sequence[CaseRecord]) -> bool:
    """Whether two ranks that both know a group counted different collectives in it."""
    for key in {key for record in records for key in record.collectives}:
        known = {record.collectives[key] for record in records if key in record.collectives}
        if len(known) > 1:
            return True
    return False


def _division(adapter: Adapter, case: Case) -> Division | None:
    """How the implementation divides in this case; which modules are units has no part in it."""
    flat = replace(case, wrapping=WrappingPlan(), world=WorldSpec(case.world.size))
    return adapter.division(setup_of(flat, nn.Module(), 0, torch.device("cpu"), None, None))


def _widened(expectation: Expectation, case: Case) -> Expectation:
    """Takes the narrowest dtype of any part as that of every rounding: what it rounds goes on into all the others.

    The oracle bounds each quantity by the roundings of its own dtype, which is right where all parts have one.
    """
    narrow = _narrowest(case)
    if narrow is None:
        return expectation
    unit = _ROUNDINGS_OF_A_PART * UNIT_ROUNDOFF[narrow]
    why = f"; parts in {narrow}: {_ROUNDINGS_OF_A_PART} x u x largest"
    points = []
    for point in expectation.points:
        sizes = [_size(expected.value) for expected in point.quantities.values()]
        slack = unit * max(sizes, default=0.0)
        quantities = {
            quantity: replace(expected, bound=expected.bound + slack, derivation=expected.derivation + why)
            if _size(expected.value)
            else expected
            for quantity, expected in point.quantities.items()
        }
        points.append(replace(point, quantities=quantities))
    return replace(expectation, points=tuple(points))


def _size(value: torch.Tensor | None) -> float:
    if value is None or not value.numel() or not value.is_floating_point():
        return 0.0
    return float(value.abs().max())


def _narrowest(case: Case) -> str | None:
    """The dtype with the fewest digits among those of the parts; None if all parts have one dtype."""
    if case.model.tree is None:
        mixed = "mixed_dtypes" in MODELS[case.model.name].traits
        return ("float32" if case.model.dtype == "float64" else "bfloat16") if mixed else None
    found = {spec.dtype or case.model.dtype for spec in parameters(case.model.tree)}
    return max(found, key=lambda name: UNIT_ROUNDOFF[name]) if len(found) > 1 else None


def _overflows(expectation: Expectation) -> bool:
    """Whether a value or a bound is not finite: then nothing can be said of a difference."""
    for point in expectation.points:
        for expected in point.quantities.values():
            bound = torch.as_tensor(expected.bound)
            if not bool(torch.isfinite(bound).all()) or not math.isfinite(_size(expected.value)):
                return True
    return False


def _in_lockstep(
    adapter: Adapter, case: Case, ranks: list[RankObservation], comparison: Comparison
) -> tuple[Expectation, Tally]:
    """Compares with bounds that take one replay, and where these do not settle it with those that take two."""
    division, states = _division(adapter, case), adoption.states(ranks)
    expectation = oracle.expect_lockstep(case, division, states, displaced=False)
    tally = parity.compare(expectation, ranks, comparison)
    if tally.divergences or tally.undecided:
        expectation = oracle.expect_lockstep(case, division, states)
        tally = parity.compare(expectation, ranks, comparison)
    return expectation, tally


def _compare(adapter: Adapter, case: Case, ranks: list[RankObservation], watch: Watch) -> CaseNote:
    comparison = comparison_for(case, adapter)
    if not comparison.lockstep:
        if not comparison.ignore:
            points = Replay(case).run(observe_all=watch.operations)
            compared = screen.cleared(points, ranks, comparison)
            if compared > 0:
                return CaseNote(0, "passed", comparisons=compared, screened=True)
        expectation = _widened(oracle.expect_free(case, observe_all=watch.operations), case)
        tally = parity.compare(expectation, ranks, comparison)
    else:
        expectation, tally = _in_lockstep(adapter, case, ranks, comparison)
    if tally.divergences and _overflows(expectation):
        return CaseNote(0, "unjudged", "the oracle's own numbers overflow")
    if tally.divergences:
        first = parity.first(tally.divergences)
        return CaseNote(
            0, "suspect", f"{first.quantity} {first.sentence}", tally.comparisons, signature=of_divergence(case, first)
        )
    if not tally.comparisons:
        return CaseNote(0, "unjudged", "nothing was compared")
    if tally.undecided:
        first = tally.undecided[0]
        return CaseNote(0, "unjudged", f"{first.quantity} {first.sentence}", tally.comparisons)
    return CaseNote(0, "passed", comparisons=tally.comparisons)
