"""Runs a batch, and judges it in a separate process while the ranks run the next one.

Most cases agree with the oracle to the bit or nearly so, which one undisturbed replay shows: each quantity gets a bound that is
smaller than that of the full comparison everywhere. A case that passes is right; any other goes to the full comparison, which
alone may report a divergence.
"""

from __future__ import annotations

import functools
import math
import shutil
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.adapters.protocol import Division
from fsdp_testing.cases.records import UNIT_ROUNDOFF, Case, CaseRecord, Judgement, RankObservation, Verdict, WorldSpec
from fsdp_testing.errors import HarnessError, PoolBroken
from fsdp_testing.judging import record_stream
from fsdp_testing.judging.attempts import Attempt
from fsdp_testing.judging.batch import Watch, run_batch
from fsdp_testing.judging.checkers import agreement
from fsdp_testing.judging.checkers.divergence import Compared
from fsdp_testing.judging.judge import judge
from fsdp_testing.judging.numbers import Numbers, compare_numbers
from fsdp_testing.judging.worlds import Worlds
from fsdp_testing.oracle import assemble, oracle
from fsdp_testing.oracle.assemble import GatheredState
from fsdp_testing.oracle.kept_groups import LASTING
from fsdp_testing.oracle.models import dtype_name
from fsdp_testing.oracle.oracle import point_of
from fsdp_testing.oracle.quantities import Comparison, Expectation, Expected
from fsdp_testing.oracle.replay import Replay
from fsdp_testing.oracle.setup import division_of, fitted, lockstep_view, oracle_view
from fsdp_testing.ranks.pool import WorldOutcome

ROUNDINGS = 12
"""Fewer than `oracle.roundings_of` gives for any case: ranks, micro-batches, and at least one layer with its rows."""


def fast_path_agrees(replay: Replay, ranks: Sequence[RankObservation], comparison: Comparison = Comparison()) -> int:
    """Return how many tensors were compared if everything certainly agrees, and -1 if not.

    Args:
        replay: The undisturbed oracle's, when it has run.
        ranks: The ranks' reports, by rank.
        comparison: The kinds to compare, and whether a gradient of zeros may stand for None.
    """
    # The comparison ends before the operation that raised, and would pass quantities that it has not seen.
    if any(rank.error is not None for rank in ranks):
        return -1
    tally = agreement.compare(_expectation(replay), ranks, comparison)
    return -1 if tally.divergences or tally.undecided else tally.comparisons


@functools.lru_cache(maxsize=16)  # of one replay many cases are compared with
def _expectation(replay: Replay) -> Expectation:
    points = tuple(
        point_of(point, {quantity: _closely(value) for quantity, value in point.values.items()})
        for point in replay.points
    )
    return Expectation(points, replay.shapes)


def _closely(value: torch.Tensor | None) -> Expected:
    if value is None or not value.numel() or not value.is_floating_point():
        return Expected(value)
    largest = float(value.abs().max())
    # Numbers that are not finite must be the same.
    return Expected(
        value, ROUNDINGS * UNIT_ROUNDOFF[dtype_name(value.dtype)] * largest if math.isfinite(largest) else 0.0
    )


_SECONDS_PER_CASE = 0.5
_JUDGE_SECONDS = 300.0


def attempt_batch(
    worlds: Worlds,
    adapter: Adapter,
    cases: Sequence[Case],
    watch: Watch,
    timeout: float,
    on_records: Callable[[str], object],
) -> Attempt:
    """Run cases on one world and have them judged.

    Args:
        worlds: The worlds to run in.
        adapter: The implementation.
        cases: For one size of world.
        watch: What else to observe, besides the numbers.
        timeout: Seconds that one case may take before it counts as hung.
        on_records: Called with the folder of the ranks' reports, before it is removed.

    Raises:
        PoolBroken: The pool, or the judging process, was lost.
    """
    directory = worlds.pool.shared_directory("fsdp-batch-")
    try:
        outcome = _run(worlds, adapter, cases, watch, timeout, directory)
        on_records(directory)
        arguments = (adapter, cases, cases[0].world.size, directory, watch.operations)
        return Attempt(ask_judge(worlds, judge_batch, arguments, "a batch"), outcome)
    # After the judgement, which reads the files in a process of its own.
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _run(
    worlds: Worlds, adapter: Adapter, cases: Sequence[Case], watch: Watch, timeout: float, directory: str
) -> WorldOutcome:
    spec = cases[0].world
    seconds = timeout + _SECONDS_PER_CASE * len(cases)
    arguments = (adapter, cases, directory, watch)
    try:
        return worlds.execute(spec, run_batch, arguments, "batch", timeout=seconds, lasting=LASTING)
    except PoolBroken as broken:
        begun = min(len(record_stream.read(directory, rank)) for rank in range(spec.size))
        raise PoolBroken(f"case {cases[min(begun, len(cases) - 1)].identity}: {broken}") from broken


def ask_judge(
    worlds: Worlds, job: Callable[..., Sequence[Judgement]], arguments: tuple[Any, ...], subject: str
) -> Sequence[Judgement]:
    """Have what ranks reported judged in a process of its own.

    Raises:
        PoolBroken: It was lost.
    """
    outcome = worlds.execute(WorldSpec(1), job, arguments, "judge", timeout=_JUDGE_SECONDS)
    if not outcome.ok:
        raise PoolBroken(f"the judge of {subject} was lost. {outcome.describe()}")
    judgements: Sequence[Judgement] = outcome.ranks[0].value
    return judgements


def judge_batch(
    adapter: Adapter, cases: Sequence[Case], size: int, directory: str, observe_all: bool
) -> list[Judgement]:
    """Judge every case of a batch; a judgement is `incomplete` where a rank reported nothing."""
    reported = [by_index(record_stream.read(directory, rank)) for rank in range(size)]
    judgements = []
    for index, case in enumerate(cases):
        records = [of_rank[index] for of_rank in reported if index in of_rank]
        judgements.append(_judged(adapter, fitted(case, adapter), records, observe_all=observe_all))
    return judgements


def comparison_for(case: Case, adapter: Adapter) -> Comparison:
    """Return the comparison that is fair for a case, given what the implementation claims."""
    return Comparison(
        lockstep=case.low_precision,
        none_is_zero="unused_gradient_is_none" not in adapter.capabilities,
        gradients=adapter.observes_gradients,
        optimizer="optimizer_pieces" in adapter.capabilities,
        ignore=tuple(f"{module}.*" for module in case.wrapping.ignored),
    )


def by_index(records: Sequence[CaseRecord]) -> dict[int, CaseRecord]:
    """Return the records of one rank; a later one of the same case holds what was found after the batch, and is put beside it."""
    joined: dict[int, CaseRecord] = {}
    for record in records:
        earlier = joined.get(record.index)
        joined[record.index] = record if earlier is None else replace(earlier, leaks=earlier.leaks + record.leaks)
    return joined


def _judged(adapter: Adapter, case: Case, records: Sequence[CaseRecord], *, observe_all: bool) -> Judgement:
    def ask(ranks: Sequence[RankObservation]) -> Numbers:
        return ask_here(adapter, case, ranks, observe_all=observe_all)

    try:
        return judge(case, records, ask)
    except Exception as error:  # noqa: BLE001 - a case that the oracle cannot run is reported, never passed over
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        return Judgement(Verdict.UNKNOWN, reason=f"{type(error).__name__} at {where}: {error}")


def ask_here(adapter: Adapter, case: Case, ranks: Sequence[RankObservation], *, observe_all: bool) -> Numbers:
    """Compare with an oracle that runs in this process, with no more replays than the numbers need.

    A free replay without bounds clears most cases; in lockstep, bounds that take one replay are asked before those that
    take two.
    """
    comparison = comparison_for(case, adapter)
    if comparison.lockstep and not comparison.gradients:
        raise HarnessError(
            f"{adapter.name}: expected gradients, since a case in mixed precision is judged step by step by them, got none (the "
            "adapter has no local_pieces). Give it local_pieces."
        )
    if not comparison.lockstep:
        compared = fast_path_agrees(_undisturbed(case, observe_all=observe_all), ranks, comparison)
        # Without any comparison there is no pass either: the full comparison must say why.
        if compared > 0:
            return Numbers(Compared(comparisons=compared), fast=True)
        return compare_numbers(case, oracle.expect_free(case, observe_all=observe_all), ranks, comparison)
    division, states = division_of(case, adapter), assemble.states(ranks)
    # The narrowest bounds first: agreement within them is final, and takes one replay instead of two.
    quick = compare_numbers(case, _undisplaced(case, division, states), ranks, comparison)
    if quick.decided:
        return quick
    return compare_numbers(case, oracle.expect_lockstep(case, division, states), ranks, comparison)


_LATEST: list[tuple[Case, bool, Replay]] = []
# Those used last come first; what a batch asks again is nearly always among them.
_LATEST_KEPT = 16


def _undisturbed(case: Case, *, observe_all: bool) -> Replay:
    """Return the oracle's finished free replay; the last ones are kept for cases that look the same to the oracle."""
    view = oracle_view(case)
    for index, (seen_as, observed_all, kept_replay) in enumerate(_LATEST):
        if observed_all == observe_all and seen_as == view:
            _LATEST.insert(0, _LATEST.pop(index))
            return kept_replay
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
    """Return the oracle's lockstep for these states of an implementation; it is kept for others in the same states.

    Implementations whose sums have one order hold the same numbers whatever their units are.
    """
    view = lockstep_view(case)
    for followed in _FOLLOWED:
        if (followed.division, followed.seen_as) == (division, view) and _are_same(followed.states, states):
            return followed.expectation
    made = _Followed(view, division, states, oracle.expect_lockstep(view, division, states, displaced=False))
    _FOLLOWED[:] = [made, *_FOLLOWED[: _LATEST_KEPT - 1]]
    return made.expectation


def _are_same(left: Mapping[int, GatheredState], right: Mapping[int, GatheredState]) -> bool:
    return left.keys() == right.keys() and all(state.same_as(right[index]) for index, state in left.items())
