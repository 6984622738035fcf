"""Judges a state: the saved state equals the trained one, the loaded state the saved one, and the next step is right.

Runs in a separate process, which reads the ranks' reports. The ranks' state right before saving is the
truth: it was read piece by piece, without any code that saves.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.cases.records import RAISES, Case, CaseRecord, FailureKind, Finding, Judgement, Verdict
from fsdp_testing.judging import record_stream
from fsdp_testing.judging.batch_judge import by_index
from fsdp_testing.judging.checkers import agreement
from fsdp_testing.judging.checkers.divergence import Compared
from fsdp_testing.judging.checkers.explain import finding, finding_of
from fsdp_testing.judging.judge import judge
from fsdp_testing.judging.numbers import Numbers
from fsdp_testing.oracle import oracle
from fsdp_testing.oracle.disturbance import Disturbance
from fsdp_testing.oracle.quantities import Comparison, Expectation
from fsdp_testing.oracle.rank_jobs import no_warnings
from fsdp_testing.oracle.replay import Replay
from fsdp_testing.oracle.setup import as_observed
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


@dataclass(frozen=True, slots=True)
class Truth:
    """The trained state, and the state after the next step.

    Attributes:
        entries: Right before saving.
        later: After one step more.
        place: Implementation and layout.
    """

    entries: Entries
    later: Entries
    place: str


def judge_items(adapter: Adapter, layout: Layout, items: Sequence[Item], directory: str) -> list[Judgement]:
    """Judge the ranks' reports; a judgement is `incomplete` if a rank reported nothing and none raised. Collectives: none."""
    reported = [by_index(record_stream.read(directory, rank)) for rank in range(layout.size)]
    with no_warnings():
        return [
            _judged(adapter, layout, item, [records[index] for records in reported if index in records])
            for index, item in enumerate(items)
        ]


def _judged(adapter: Adapter, layout: Layout, item: Item, records: Sequence[CaseRecord]) -> Judgement:
    case = case_of(SUBJECTS[item.subject], layout, adapter)

    def ask(ranks: Sequence[Any]) -> Numbers:
        raised = any(rank.error is not None for rank in ranks)
        if raised and not (item.loads and all(rank.beside for rank in ranks)):
            return Numbers(Compared())
        # An entry that is missing in a state may make the next step fail.
        place = f"{adapter.reference} {layout.name}"
        wrong = _loaded(item, ranks) if item.loads else _saved(case, item, ranks, place)
        wrong = wrong or ("" if raised else _settings(item, ranks))
        if wrong or raised:
            return Numbers(Compared(), finding=_differs(case, wrong, layout.size) if wrong else None)
        return _step(adapter, layout, item, ranks, place)

    try:
        judgement = judge(case, records, ask)
    except Exception as error:  # noqa: BLE001 - what an adapter saved may have any form
        return Judgement(Verdict.UNKNOWN, reason=f"not judged: {type(error).__name__}: {error}")
    return _told(judgement, records)


def _told(judgement: Judgement, records: Sequence[CaseRecord]) -> Judgement:
    """Say of what ranks raised, and of what stays behind, at which stage that was."""
    errors = [record.observation for record in records if record.observation.error is not None]
    if errors and (judgement.finding is None or judgement.finding.kind in RAISES):
        first: Any = errors[0]
        text = f"{first.stage}: {first.error.type_name}: {' '.join(first.error.message.split())}"
        if judgement.finding is None:
            return replace(judgement, reason=text)
        if judgement.finding.kind == FailureKind.ONE_RAISED:
            ranks = ", ".join(str(rank.rank) for rank in errors)
            text = f"only on rank {ranks} of {judgement.finding.case.world.size}: {text}"
        return replace(judgement, finding=replace(judgement.finding, explanation=text, operation_text=str(first.stage)))
    if judgement.only_model_stays and judgement.finding is not None:
        text = f"{Stage.FURTHER_STEP}: {judgement.finding.statement}, on rank {judgement.finding.ranks[0]}"
        return replace(judgement, finding=replace(judgement.finding, explanation=text))
    return judgement


def _differs(case: Case, sentence: str, size: int) -> Finding:
    ranks = tuple(range(size))
    return finding(case, FailureKind.DIVERGED, "the state", -1, sentence, sentence, ranks=ranks)


def _loaded(item: Item, ranks: Sequence[StateObservation]) -> str:
    """Say how the loaded state differs from the saved one; nothing if they are equal."""
    truth: Truth = loads((Path(item.folder) / _TRUTH).read_bytes())
    try:
        entries = of_ranks(ranks)
    except Contradiction as text:
        return f"{Stage.LOADING}: {text}"
    wrong = first_difference(_expected_entries(_on_ranks(truth.entries, len(ranks)), item, entries), entries)
    return f"{Stage.LOADING}: {wrong}" if wrong else ""


def _saved(case: Case, item: Item, ranks: Sequence[StateObservation], place: str) -> str:
    """Say how the saved state differs from the ranks' state, and keep the truth; nothing if they are equal."""
    folder = Path(item.folder)
    try:
        truth = Truth(of_ranks(ranks), of_ranks(ranks, LATER), place)
        after = of_ranks(ranks, 1)
    except Contradiction as text:
        return f"{Stage.SAVING}: {text}"
    changed = first_difference(truth.entries, after)
    if changed:
        return f"{Stage.SAVING} changes what is trained: {changed}"
    (folder / _TRUTH).write_bytes(dumps(truth))
    saved = of_state(read(item.way, folder))
    wrong = first_difference(_expected_entries(truth.entries, item, saved), saved)
    wrong = wrong or _unknown(case, truth.entries, read(item.way, folder))
    return f"{Stage.SAVING}: {wrong}" if wrong else ""


def _unknown(case: Case, truth: Entries, state: Mapping[str, Any]) -> str:
    """Say which saved entry no module and no parameter of the plain model has; other implementations would refuse it."""
    plain = Replay(case).master
    parameters = {name for name, _ in plain.named_parameters(remove_duplicate=False)}
    parameters |= {entry.name for entry in truth if entry.kind == "setting"}  # flat ones too
    unknown = [name for name in state["model"] if name not in plain.state_dict()]
    unknown += [name for name in (state.get("optimizer") or {}).get("state") or {} if name not in parameters]
    return f"{unknown[0]} is no parameter or buffer of the model" if unknown else ""


def _on_ranks(truth: Entries, size: int) -> Entries:
    """Return the state that this many ranks must load: the saved random states are repeated if there are more ranks."""
    random = [value for entry, value in truth.items() if entry.kind == "random numbers"]
    others = {entry: value for entry, value in truth.items() if entry.kind != "random numbers"}
    return others | {random_numbers(rank): random[rank % len(random)] for rank in range(size if random else 0)}


def _settings(item: Item, ranks: Sequence[StateObservation]) -> str:
    """Say where the settings of groups and the schedule differ from one process after the further step."""
    if item.loads and not item.optimizer:
        return ""
    truth: Truth = loads((Path(item.folder) / _TRUTH).read_bytes())
    try:
        actual = of_ranks(ranks, LATER)
    except Contradiction as text:
        return f"{Stage.FURTHER_STEP}: {text}"
    entries = _expected_entries(truth.entries, item, actual)
    expected = {entry: value for entry, value in entries.items() if entry.kind in ("setting", "schedule")}
    wrong = first_difference(_advanced(expected, SUBJECTS[item.subject]), actual)
    return f"{Stage.FURTHER_STEP}: {wrong}" if wrong else ""


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


def _expected_entries(truth: Entries, item: Item, actual: Entries) -> Entries:
    """Return the part of the truth that must be present, with the names that its settings have there.

    A flat parameter has one name for all its originals; then all parameters have the same settings.
    """
    if not item.optimizer:
        return {entry: value for entry, value in truth.items() if entry.kind in ("parameter", "buffer")}
    kept = {entry: value for entry, value in truth.items() if entry.kind != "setting"}
    settings = {entry: value for entry, value in truth.items() if entry.kind == "setting"}
    named = {entry.name for entry in (*settings, *actual) if entry.kind == "setting"}
    if named <= {entry.name for entry in truth if entry.kind == "parameter"}:
        return kept | settings
    common = {entry.part: value for entry, value in settings.items()}
    names = dict.fromkeys(entry.name for entry in actual if entry.kind == "setting") or {"every parameter": None}
    return kept | {Entry("setting", name, part): value for name in names for part, value in common.items()}


def _step(adapter: Adapter, layout: Layout, item: Item, ranks: Sequence[StateObservation], place: str) -> Numbers:
    """Compare the next step with the oracle's, within its bound, and with the saver's own where every sum has one order."""
    truth: Truth = loads((Path(item.folder) / _TRUTH).read_bytes())
    case = case_of(SUBJECTS[item.subject], layout, adapter)
    # Of three ranks and more the order of a sum may depend on what came before: DDP sorts its buckets after the first step.
    if item.optimizer and truth.place == place and layout.size <= 2:
        try:
            wrong = first_difference(truth.later, of_ranks(ranks, LATER))
        except Contradiction as text:
            wrong = str(text)
        if wrong:
            sentence = f"{Stage.FURTHER_STEP}: {wrong}, as in the run that was saved"
            return Numbers(Compared(), finding=_differs(case, sentence, layout.size))
    step = fresh_case(SUBJECTS[item.subject], case, loaded=item.optimizer or not item.loads)
    expectation = _expected(step, item, truth)
    tally = agreement.compare(expectation, ranks, as_observed(Comparison(), adapter))
    if not tally.divergences:
        return Numbers(tally, expectation)
    diverged = finding_of(step, agreement.first(tally.divergences), tally.divergences)
    diverged = replace(diverged, explanation=f"{Stage.FURTHER_STEP}: {diverged.explanation}")
    return Numbers(tally, expectation, finding=diverged)


def _expected(case: Case, item: Item, truth: Truth) -> Expectation:
    """Return the oracle's result of one step from the truth; cached with it, because it is the same for every loader."""
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
    """A replay that begins with the saved state."""

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
            group["lr"] = rates.get(names[id(group["params"][0])], group["lr"])  # the rate that the schedule set
