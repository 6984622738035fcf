"""Is what was saved what was trained, is what was loaded what was saved, and is the next step the right one?

Runs in a process of its own, which reads what the ranks reported. The state of the ranks right before saving is the
truth: it was read piece by piece, without any code that saves.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.cases.records import Case, Verdict
from fsdp_testing.judging import record_stream
from fsdp_testing.judging.checkers import agreement
from fsdp_testing.judging.checkers.explain import finding_of
from fsdp_testing.oracle import oracle
from fsdp_testing.oracle.comparison import Comparison
from fsdp_testing.oracle.disturbance import Disturbance
from fsdp_testing.oracle.fitting import as_observed
from fsdp_testing.oracle.quantities import Expectation
from fsdp_testing.oracle.rank_jobs import no_warnings
from fsdp_testing.oracle.replay import Replay
from fsdp_testing.oracle.ways import read
from fsdp_testing.ranks.pool.channel import dumps, loads
from fsdp_testing.search.checkpoints.axes import SUBJECTS, Layout, Subject, case_of, schedule_of
from fsdp_testing.search.checkpoints.entries import (
    LATER,
    Contradiction,
    Entries,
    Entry,
    first_difference,
    of_ranks,
    of_state,
    random_numbers,
)
from fsdp_testing.search.checkpoints.on_ranks import Item, Stage, StateObservation, fresh_case, grouped

_TRUTH = "truth.pickle"
_REASON_LENGTH = 400


@dataclass(frozen=True, slots=True)
class Judged:
    """What is said of one item.

    Attributes:
        verdict: `PASS`, `FAIL` or `UNKNOWN`.
        reason: The first entry that differs, or what was raised.
        loud: It fails by an error that every rank raised while it saved or loaded: nobody trains on with wrong numbers.
        alone: Some ranks raised, and others did not come to the end: they may have been left alone.
    """

    verdict: Verdict
    reason: str = ""
    loud: bool = False
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Truth:
    """What was trained, and what the next step made of it.

    Attributes:
        entries: Right before saving.
        later: After one step more.
        place: Implementation and layout.
    """

    entries: Entries
    later: Entries
    place: str


def judge_items(adapter: Adapter, layout: Layout, items: Sequence[Item], directory: str) -> list[Judged | None]:
    """Judge what ranks reported; None where a rank reported nothing and none raised. Collectives: none."""
    records = [record_stream.read(directory, rank) for rank in range(layout.size)]
    everyone = [{r.index: r.observation for r in of_rank if not r.leaks} for of_rank in records]
    kept = {r.index: (rank, r.leaks[0]) for rank, of_rank in enumerate(records) for r in of_rank if r.leaks}
    found: list[Judged | None] = []
    with no_warnings():
        for index, item in enumerate(items):
            ranks: list[Any] = [one.get(index) for one in everyone]
            raised = [rank for rank in ranks if rank is not None and rank.error is not None]
            if raised:
                # What is missing in a state may be what the next step stumbles over.
                loaded = item.loads and all(rank is not None and rank.beside for rank in ranks)
                found.append((_of_loaded(item, ranks) if loaded else None) or _of_errors(raised, layout.size))
            elif None in ranks:
                found.append(None)
            else:
                try:
                    found.append(_of_numbers(adapter, layout, item, ranks))
                except Exception as error:  # noqa: BLE001 - what an adapter saved may have any form
                    found.append(
                        Judged(Verdict.UNKNOWN, f"not judged: {type(error).__name__}: {error}"[:_REASON_LENGTH])
                    )
            judged = found[-1]
            if index in kept and judged is not None and judged.verdict is Verdict.PASS:
                rank, leak = kept[index]
                found[-1] = Judged(Verdict.FAIL, f"{Stage.FURTHER_STEP}: left behind: {leak}, on rank {rank}")
    return found


def _of_errors(raised: Sequence[StateObservation], size: int) -> Judged:
    """Judge what ranks raised: loud is what every rank raises alike before it goes on training."""
    first = raised[0]
    assert first.error is not None
    text = " ".join(first.error.message.split())
    reason = f"{first.stage}: {first.error.type_name}: {text}"[:_REASON_LENGTH]
    if first.error.not_implementation_fault:
        return Judged(Verdict.UNKNOWN, reason)
    if len(raised) < size:
        ranks = ", ".join(str(one.rank) for one in raised)
        return Judged(Verdict.FAIL, f"only on rank {ranks} of {size}: {reason}", alone=True)
    loud = first.stage in (Stage.SAVING, Stage.LOADING) or first.error.not_supported
    return Judged(Verdict.FAIL, reason, loud=loud)


def _of_loaded(item: Item, ranks: Sequence[StateObservation]) -> Judged | None:
    """Judge the state that ranks loaded; None if it is what was saved."""
    truth: Truth = loads((Path(item.folder) / _TRUTH).read_bytes())
    try:
        entries = of_ranks(ranks)
    except Contradiction as text:
        return Judged(Verdict.FAIL, f"{Stage.LOADING}: {text}")
    asked = _asked(_on_ranks(truth.entries, len(ranks)), item, entries)
    wrong = first_difference(asked, entries)
    return Judged(Verdict.FAIL, f"{Stage.LOADING}: {wrong}") if wrong else None


def _of_saved(item: Item, ranks: Sequence[StateObservation], place: str) -> Judged | None:
    """Judge what was saved, and keep the truth of it; None if it is what the ranks held."""
    folder = Path(item.folder)
    try:
        truth = Truth(of_ranks(ranks), of_ranks(ranks, LATER), place)
        after = of_ranks(ranks, 1)
    except Contradiction as text:
        return Judged(Verdict.FAIL, f"{Stage.SAVING}: {text}")
    changed = first_difference(truth.entries, after)
    if changed:
        return Judged(Verdict.FAIL, f"{Stage.SAVING} changes what is trained: {changed}")
    (folder / _TRUTH).write_bytes(dumps(truth))
    saved = of_state(read(item.way, folder))
    wrong = first_difference(_asked(truth.entries, item, saved), saved)
    return Judged(Verdict.FAIL, f"{Stage.SAVING}: {wrong}") if wrong else None


def _of_numbers(adapter: Adapter, layout: Layout, item: Item, ranks: Sequence[StateObservation]) -> Judged:
    place = f"{adapter.reference} {layout.name}"
    wrong = _of_loaded(item, ranks) if item.loads else _of_saved(item, ranks, place)
    return wrong or _of_settings(item, ranks) or _of_step(adapter, layout, item, ranks, place)


def _on_ranks(truth: Entries, size: int) -> Entries:
    """Return what so many ranks have to load: of other numbers of random states as many as there were, again and again."""
    random = [value for entry, value in truth.items() if entry.kind == "random numbers"]
    others = {entry: value for entry, value in truth.items() if entry.kind != "random numbers"}
    return others | {random_numbers(rank): random[rank % len(random)] for rank in range(size if random else 0)}


def _of_settings(item: Item, ranks: Sequence[StateObservation]) -> Judged | None:
    """Judge the settings of groups, and the schedule, after the further step: those of one process."""
    if item.loads and not item.optimizer:
        return None
    truth: Truth = loads((Path(item.folder) / _TRUTH).read_bytes())
    actual = of_ranks(ranks, LATER)
    asked = _asked(truth.entries, item, actual)
    expected = {entry: value for entry, value in asked.items() if entry.kind in ("setting", "schedule")}
    wrong = first_difference(_advanced(expected, SUBJECTS[item.subject]), actual)
    return Judged(Verdict.FAIL, f"{Stage.FURTHER_STEP}: {wrong}") if wrong else None


def _advanced(entries: Entries, subject: Subject) -> Entries:
    """Return settings and schedule after one step of the schedule, of an optimizer that has nothing but these settings."""
    if not subject.scheduled:
        return entries
    rates = {entry.name: value for entry, value in entries.items() if entry.kind == "setting" and entry.part == "lr"}
    in_order = sorted({(not name.startswith("first."), rate) for name, rate in rates.items()})
    optimizer = torch.optim.SGD([{"params": [torch.zeros(1)]} for _ in in_order], lr=1.0)
    schedule = schedule_of(subject, optimizer)
    schedule.load_state_dict({entry.part: value for entry, value in entries.items() if entry.kind == "schedule"})
    for group, (_, rate) in zip(optimizer.param_groups, in_order):
        group["lr"] = rate
    schedule.step()
    next_rate = {rate: group["lr"] for group, (_, rate) in zip(optimizer.param_groups, in_order)}
    later: Entries = {Entry("setting", name, "lr"): next_rate[rate] for name, rate in rates.items()}
    later |= {Entry("schedule", "the schedule", part): value for part, value in schedule.state_dict().items()}
    return entries | later


def _asked(truth: Entries, item: Item, actual: Entries) -> Entries:
    """Return the part of the truth that must be there, with the names that are there for settings.

    A flat parameter has one name for all that is in it; then all parameters have the same settings.
    """
    if not item.optimizer:
        return {entry: value for entry, value in truth.items() if entry.kind in ("parameter", "buffer")}
    kept = {entry: value for entry, value in truth.items() if entry.kind != "setting"}
    settings = {entry: value for entry, value in truth.items() if entry.kind == "setting"}
    named = {entry.name for entry in (*settings, *actual) if entry.kind == "setting"}
    if not any(name.rpartition(".")[2] == "flat" for name in named):
        return kept | settings
    common = {entry.part: value for entry, value in settings.items()}
    names = dict.fromkeys(entry.name for entry in actual if entry.kind == "setting") or {"every parameter": None}
    return kept | {Entry("setting", name, part): value for name in names for part, value in common.items()}


def _of_step(adapter: Adapter, layout: Layout, item: Item, ranks: Sequence[StateObservation], place: str) -> Judged:
    """Judge the step that follows: the oracle's within its bound, and the saver's own where no sum can be another."""
    truth: Truth = loads((Path(item.folder) / _TRUTH).read_bytes())
    # Of three ranks and more the order of a sum may depend on what came before: DDP sorts its buckets after the first step.
    if item.optimizer and truth.place == place and layout.size <= 2:
        try:
            wrong = first_difference(truth.later, of_ranks(ranks, LATER))
        except Contradiction as text:
            wrong = str(text)
        if wrong:
            return Judged(Verdict.FAIL, f"{Stage.FURTHER_STEP}: {wrong}, as in the run that was saved")
    case = case_of(SUBJECTS[item.subject], layout, adapter)
    step = fresh_case(SUBJECTS[item.subject], case, loaded=item.optimizer or not item.loads)
    expectation = _expected(step, item, truth)
    tally = agreement.compare(expectation, ranks, as_observed(Comparison(), adapter))
    if tally.divergences:
        found = finding_of(step, agreement.first(tally.divergences), tally.divergences)
        return Judged(Verdict.FAIL, f"{Stage.FURTHER_STEP}: {found.explanation}"[:_REASON_LENGTH])
    if tally.undecided or not tally.comparisons:
        return Judged(Verdict.UNKNOWN, f"{Stage.FURTHER_STEP}: nothing was compared, or nothing follows from it")
    return Judged(Verdict.PASS)


def _expected(case: Case, item: Item, truth: Truth) -> Expectation:
    """Return what the oracle makes of the truth in one step; kept beside it, since it is the same for every loader."""
    kept = Path(item.folder) / f"expected-{case.world.size}-{item.loads and not item.optimizer}.pickle"
    if kept.exists():
        expectation: Expectation = loads(kept.read_bytes())
        return expectation

    def continued(disturbance: Disturbance) -> Replay:
        return _Continued(case, item, truth.entries, disturbance)

    expectation = oracle.expect_free(case, make=continued)
    kept.write_bytes(dumps(expectation))
    return expectation


class _Continued(Replay):
    """A replay that begins with what was saved."""

    def __init__(self, case: Case, item: Item, entries: Entries, disturbance: Disturbance) -> None:
        super().__init__(case, disturbance=disturbance)
        self._entries = entries
        self._item = item
        with torch.no_grad():
            for fqn, parameter in self.parameters.items():
                parameter.copy_(entries[Entry("parameter", fqn)])
            for replica in self.replicas:
                for fqn, buffer in replica.named_buffers():
                    buffer.copy_(entries[Entry("buffer", fqn)])
        self.refresh()

    def build_optimizer(self) -> None:
        """Build it with the groups of the subject, and put the saved state and settings into it."""
        first = dict(SUBJECTS[self._item.subject].first)
        carried = self._item.optimizer or not self._item.loads
        if first and not carried:
            first = dict.fromkeys(first, 0.3)
        names = {id(parameter): fqn for fqn, parameter in self.parameters.items()}
        optimizer: Any = grouped(self.case, names, first, self.parameters.values())
        self.optimizer = optimizer
        rates: dict[str, float] = {}
        for entry, value in self._entries.items() if carried else ():
            if entry.kind == "state":
                number = value if isinstance(value, torch.Tensor) else torch.tensor(float(value))
                optimizer.state[self.parameters[entry.name]][entry.part] = copy.deepcopy(number)
            elif (entry.kind, entry.part) == ("setting", "lr"):
                rates[entry.name] = value
        for group in optimizer.param_groups:
            group["lr"] = rates.get(names[id(group["params"][0])], group["lr"])  # as the schedule left it
