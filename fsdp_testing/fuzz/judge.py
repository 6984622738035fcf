"""How is a finished batch judged? In a process of its own: the oracle replays, the screen clears, parity decides.

Runs in the single rank of a world of one, while the ranks are busy with the next batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fsdp_testing.checkers import adoption, parity
from fsdp_testing.checkers.divergence import Tally
from fsdp_testing.checkers.parity import Comparison
from fsdp_testing.fuzz import screen, stream
from fsdp_testing.fuzz.batch import OUTLIVES
from fsdp_testing.fuzz.stream import CaseRecord
from fsdp_testing.implementations import registry
from fsdp_testing.implementations.adapter import Adapter
from fsdp_testing.programs import jobs, oracle
from fsdp_testing.programs.replay import Replay
from fsdp_testing.records import Case, RankObservation


@dataclass(frozen=True, slots=True)
class CaseNote:
    """What the judge says of one case of a batch.

    Attributes:
        index: Place of the case in the batch.
        status: `passed`, `leaked` (right, but its model stays in memory), `suspect` (to be confirmed alone),
            `unfinished` (its observations are not complete),
            `unjudged` (the oracle could not run it, or nothing was compared).
        reason: Why it is not `passed`.
        comparisons: Number of tensors compared.
        screened: It was cleared by the screen alone.
    """

    index: int
    status: str
    reason: str = ""
    comparisons: int = 0
    screened: bool = False


def comparison_for(case: Case, adapter: Adapter) -> Comparison:
    """Returns the comparison that is fair for a case, given what the implementation claims."""
    return Comparison(
        lockstep=case.mixed_precision is not None,
        none_is_zero="unused_gradient_is_none" not in adapter.capabilities,
        gradients=adapter.observes_gradients,
        optimizer="optimizer_pieces" in adapter.capabilities,
        ignore=tuple(f"{module}.*" for module in case.wrapping.ignored),
    )


def judge_batch(name: str, documents: list[str], size: int, directory: str) -> list[CaseNote]:
    """Judges every case of a batch of which all ranks told.

    Args:
        name: The implementation.
        documents: Cases as JSON, in the order in which they were run.
        size: Number of ranks.
        directory: Where their observations lie.
    """
    adapter = registry.load(name)
    told: list[dict[int, CaseRecord]] = []
    for rank in range(size):
        # A later record of the same case tells of what was found after the batch, and is put beside the first.
        by_index: dict[int, CaseRecord] = {}
        for record in stream.read(directory, rank):
            known = by_index.get(record.index)
            by_index[record.index] = record if known is None else _with_leaks(known, record.leaks)
        told.append(by_index)
    return [_judge(adapter, name, index, document, told) for index, document in enumerate(documents)]


def _with_leaks(record: CaseRecord, leaks: tuple[str, ...]) -> CaseRecord:
    return CaseRecord(record.index, record.observation, record.collectives, record.leaks + leaks)


def _judge(adapter: Adapter, name: str, index: int, document: str, told: list[dict[int, CaseRecord]]) -> CaseNote:
    records = [by_index[index] for by_index in told if index in by_index]
    errors = [record.observation.error for record in records if record.observation.error is not None]
    if errors:
        return CaseNote(index, "suspect", f"{errors[0].type_name}: {errors[0].message.strip()[:200]}")
    if len(records) < len(told):
        return CaseNote(index, "unfinished")
    leaks = [leak for record in records for leak in record.leaks]
    if any(leak != OUTLIVES for leak in leaks):
        return CaseNote(index, "suspect", f"left behind: {leaks[0]}")
    if _sequences_differ(records):
        return CaseNote(index, "suspect", "the ranks did not issue the same collectives")
    case = Case.from_json(document)
    try:
        note = _compare(adapter, name, index, case, [record.observation for record in records])
        return replace(note, status="leaked", reason=leaks[0]) if leaks and note.status == "passed" else note
    except Exception as error:  # noqa: BLE001 - a case that the oracle cannot run is told, never passed over
        return CaseNote(index, "unjudged", f"{type(error).__name__}: {error}")


def _sequences_differ(records: Sequence[CaseRecord]) -> bool:
    """Whether two ranks that both know a group counted different collectives in it."""
    for key in {key for record in records for key in record.collectives}:
        known = {record.collectives[key] for record in records if key in record.collectives}
        if len(known) > 1:
            return True
    return False


def _compare(adapter: Adapter, name: str, index: int, case: Case, ranks: list[RankObservation]) -> CaseNote:
    comparison = comparison_for(case, adapter)
    if not comparison.lockstep and not comparison.ignore:
        points = Replay(case).run()
        compared = screen.cleared(points, ranks, optimizer=comparison.optimizer)
        if compared > 0:
            return CaseNote(index, "passed", comparisons=compared, screened=True)
        expectation = oracle.expect_free(case)
    elif not comparison.lockstep:
        expectation = oracle.expect_free(case)
    else:
        expectation = jobs.expect_lockstep(case, name, adoption.states(ranks))
    tally: Tally = parity.compare(expectation, ranks, comparison)
    if tally.divergences:
        first = parity.first(tally.divergences)
        return CaseNote(index, "suspect", f"{first.quantity} {first.sentence}", tally.comparisons)
    if not tally.comparisons:
        return CaseNote(index, "unjudged", "nothing was compared")
    return CaseNote(index, "passed", comparisons=tally.comparisons)
