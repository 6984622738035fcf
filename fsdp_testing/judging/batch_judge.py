"""How is a finished batch judged? In a process of its own, while the ranks are busy with the next batch."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.adapters.protocol import Division
from fsdp_testing.cases.models.tree import unit_of
from fsdp_testing.cases.records import (
    LOSES_RANKS,
    RAISES,
    Case,
    CaseRecord,
    FailureKind,
    Finding,
    Overrun,
    RankObservation,
    Verdict,
)
from fsdp_testing.judging import record_stream
from fsdp_testing.judging.checkers.divergence import Compared
from fsdp_testing.judging.fast_path import fast_path_agrees
from fsdp_testing.judging.judge import Judgement, judge
from fsdp_testing.judging.numbers import Numbers, compare_numbers
from fsdp_testing.judging.signature import Signature, signature_of
from fsdp_testing.oracle import gathered_state, oracle
from fsdp_testing.oracle.comparison import Comparison
from fsdp_testing.oracle.fitting import fitted, lockstep_view, oracle_view
from fsdp_testing.oracle.gathered_state import GatheredState
from fsdp_testing.oracle.quantities import Expectation
from fsdp_testing.oracle.replay import Replay
from fsdp_testing.oracle.setup import division_of


@dataclass(frozen=True, slots=True)
class CaseNote:
    """What the judge says of one case of a batch.

    Attributes:
        index: Place of the case in the batch.
        status: `passed`, `leaked` (right, but its model stays in memory), `suspect` (to be confirmed alone),
            `unfinished` (its observations are not complete), `unjudged` (the oracle or the adapter could not run it,
            nothing was decided, or ranks were lost in it once and not again).
        reason: Why it is not `passed`.
        comparisons: Number of tensors compared.
        fast: The fast path alone found it right.
        signature: What the failure looks like.
        overrun: The facts of a failure of kind `kept` or `excess`.
        at: Operation in or after which it fails; None if that is not known.
        units: Units in which it fails; None if that is not known.
    """

    index: int
    status: str
    reason: str = ""
    comparisons: int = 0
    fast: bool = False
    signature: Signature | None = None
    overrun: Overrun | None = None
    at: int | None = None
    units: tuple[str, ...] | None = None

    @property
    def cause(self) -> str | None:
        """Its cause, as far as the judge knows it: by how much communication is too much; None where nobody has looked."""
        return self.overrun.more if self.overrun is not None and self.overrun.more else None


def judge_batch(
    adapter: Adapter, cases: Sequence[Case], size: int, directory: str, observe_all: bool
) -> list[CaseNote]:
    """Judge every case of a batch of which all ranks reported.

    Args:
        adapter: The implementation.
        cases: In the order in which they were run.
        size: Number of ranks.
        directory: Where their observations lie.
        observe_all: A snapshot was taken after every operation.
    """
    reported = [_by_index(record_stream.read(directory, rank)) for rank in range(size)]
    notes = []
    for index, case in enumerate(cases):
        records = [by_index[index] for by_index in reported if index in by_index]
        note = _judged(adapter, fitted(case, adapter), records, observe_all=observe_all)
        notes.append(replace(note, index=index))
    return notes


def note_of(judgement: Judgement) -> CaseNote:
    """Return what a campaign makes of a judgement."""
    found = judgement.finding
    if found is None:
        status = "unfinished" if judgement.incomplete else "unjudged"
        status = "passed" if judgement.verdict is Verdict.PASS else status
        return CaseNote(0, status, judgement.reason, judgement.tally.comparisons, judgement.fast)
    only_model = found.kind == FailureKind.LEAKED and found.sort == "model"
    return CaseNote(
        0,
        "leaked" if only_model else "suspect",
        f"{found.quantity}: {found.message[:300]}" if found.kind in RAISES else found.statement,
        judgement.tally.comparisons,
        signature=signature_of(found),
        overrun=found.overrun,
        at=found.operation if found.kind not in LOSES_RANKS else None,
        units=units_of(found),
    )


def units_of(finding: Finding) -> tuple[str, ...] | None:
    """Return the units in which it fails; None where that is not known."""
    if finding.overrun is not None:
        return tuple(unit for unit, _ in finding.overrun.units) or None
    named = finding.case.wrapping.units if finding.case.wrapping.policy is None else None
    return (unit_of(finding.fqn, named),) if finding.fqn and named is not None else None


def comparison_for(case: Case, adapter: Adapter) -> Comparison:
    """Return the comparison that is fair for a case, given what the implementation claims."""
    return Comparison(
        lockstep=case.mixed_precision is not None,
        none_is_zero="unused_gradient_is_none" not in adapter.capabilities,
        gradients=adapter.observes_gradients,
        optimizer="optimizer_pieces" in adapter.capabilities,
        ignore=tuple(f"{module}.*" for module in case.wrapping.ignored),
    )


def _by_index(records: Sequence[CaseRecord]) -> dict[int, CaseRecord]:
    """The records of one rank; a later one of the same case holds what was found after the batch, and is put beside it."""
    by_index: dict[int, CaseRecord] = {}
    for record in records:
        known = by_index.get(record.index)
        by_index[record.index] = record if known is None else replace(known, leaks=known.leaks + record.leaks)
    return by_index


def _judged(adapter: Adapter, case: Case, records: Sequence[CaseRecord], *, observe_all: bool) -> CaseNote:
    def ask(ranks: Sequence[RankObservation]) -> Numbers:
        return ask_here(adapter, case, ranks, observe_all=observe_all)

    try:
        return note_of(judge(case, records, ask))
    except Exception as error:  # noqa: BLE001 - a case that the oracle cannot run is reported, never passed over
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        return CaseNote(0, "unjudged", f"{type(error).__name__} at {where}: {error}")


def ask_here(adapter: Adapter, case: Case, ranks: Sequence[RankObservation], *, observe_all: bool) -> Numbers:
    """Compare with an oracle that runs in this process, with no more replays than the numbers need.

    A free replay without bounds clears most cases; in lockstep, bounds that take one replay are asked before those that
    take two.
    """
    comparison = comparison_for(case, adapter)
    if not comparison.lockstep:
        compared = fast_path_agrees(_undisturbed(case, observe_all=observe_all), ranks, comparison)
        if compared > 0:
            return Numbers(Compared(comparisons=compared), fast=True)
        return compare_numbers(case, oracle.expect_free(case, observe_all=observe_all), ranks, comparison)
    division, states = division_of(case, adapter), gathered_state.states(ranks)
    quick = compare_numbers(case, _undisplaced(case, division, states), ranks, comparison)
    if quick.decided:
        return quick
    return compare_numbers(case, oracle.expect_lockstep(case, division, states), ranks, comparison)


_LATEST: list[tuple[Case, bool, Replay]] = []
_LATEST_KEPT = 16


def _undisturbed(case: Case, *, observe_all: bool) -> Replay:
    """Return the oracle's free replay, run; the last ones are kept, since cases may come that it sees as one."""
    view = oracle_view(case)
    for place, (seen_as, observed_all, known) in enumerate(_LATEST):
        if observed_all == observe_all and seen_as == view:
            _LATEST.insert(0, _LATEST.pop(place))
            return known
    replay = Replay(case)
    replay.run(observe_all=observe_all)
    _LATEST[:] = [(view, observe_all, replay), *_LATEST[: _LATEST_KEPT - 1]]
    return replay


@dataclass(frozen=True, slots=True)
class _Followed:
    """One replay in lockstep: what it began with, and what it gave."""

    seen_as: Case
    division: Division | None
    states: Mapping[int, GatheredState]
    expectation: Expectation


_FOLLOWED: list[_Followed] = []


def _undisplaced(case: Case, division: Division | None, states: Mapping[int, GatheredState]) -> Expectation:
    """Return the oracle's lockstep for an implementation that was in these states; kept for others that were in the same.

    Implementations whose sums have one order hold the same numbers whatever their units are.
    """
    view = lockstep_view(case)
    for known in _FOLLOWED:
        if (known.division, known.seen_as) == (division, view) and _are_same(known.states, states):
            return known.expectation
    made = _Followed(view, division, states, oracle.expect_lockstep(view, division, states, displaced=False))
    _FOLLOWED[:] = [made, *_FOLLOWED[: _LATEST_KEPT - 1]]
    return made.expectation


def _are_same(one: Mapping[int, GatheredState], other: Mapping[int, GatheredState]) -> bool:
    return one.keys() == other.keys() and all(state.same_as(other[index]) for index, state in one.items())
