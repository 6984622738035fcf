"""The source of saved states: each is saved once and loaded everywhere, many in a row on the same ranks.

Lost ranks are handled as for any other case (`judging/attempts.py`).
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.cases.records import FailureKind, Finding, Judgement, Verdict, WorldSpec, opening
from fsdp_testing.errors import InvalidArgument
from fsdp_testing.judging.attempts import Attempt, settle
from fsdp_testing.judging.batch_judge import ask_judge
from fsdp_testing.judging.case_runner import CaseRunner
from fsdp_testing.oracle.kept_groups import LASTING
from fsdp_testing.ranks.pool import Pool
from fsdp_testing.search.checkpoints.axes import LAYOUTS, SUBJECTS, WAYS, Layout, case_of, layouts_of, missing
from fsdp_testing.search.checkpoints.on_ranks import Item, Stage, run_items
from fsdp_testing.search.checkpoints.verdicts import judge_items
from fsdp_testing.search.loop import search

ITEMS_AT_ONCE = 24
SECONDS_PER_ITEM = 1.0
_REASON_LENGTH = 400


@dataclass(frozen=True, slots=True)
class Place:
    """One implementation at one layout."""

    adapter: Adapter
    layout: Layout

    @property
    def name(self) -> str:
        """Return implementation and layout, as reports name them."""
        return f"{self.adapter.name} {self.layout.name}"


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one state.

    Attributes:
        saver: Implementation and layout that saved it.
        loader: Implementation and layout that loaded it; empty for the result of saving.
        subject: One of `SUBJECTS`.
        way: One of `WAYS`.
        verdict: `PASS`, `FAIL` or `UNKNOWN`.
        reason: The first entry that differs, or what was raised.
        loud: It fails with an error that every rank raised while saving or loading.
    """

    saver: str
    loader: str
    subject: str
    way: str
    verdict: Verdict
    reason: str = ""
    loud: bool = False

    @property
    def mark(self) -> str:
        """Return the mark in reports: `=` holds, `X` fails, `r` is refused with an error on every rank, `?` unknown."""
        if self.verdict is Verdict.FAIL:
            return "r" if self.loud else "X"
        return "=" if self.verdict is Verdict.PASS else "?"


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings of an exchange.

    Attributes:
        adapters: Implementations; each saves, and each loads.
        sizes: Numbers of ranks.
        subjects: Some of `SUBJECTS`.
        ways: Some of `WAYS`.
        deadline: Seconds that one item may take before it counts as hung.
    """

    adapters: tuple[Adapter, ...]
    sizes: tuple[int, ...] = (2, 3, 4)
    subjects: tuple[str, ...] = tuple(SUBJECTS)
    ways: tuple[str, ...] = WAYS
    deadline: float = 60.0

    def places(self) -> list[Place]:
        """Return every layout at which an implementation has anything to do.

        Raises:
            InvalidArgument: An implementation or a number of ranks has no layout; all of them are named.
        """
        every = [Place(a, layout) for a in self.adapters for layout in layouts_of(a) if layout.size in self.sizes]
        places = [place for place in every if any(self.asks(place, subject) for subject in self.subjects)]
        idle = [a.name for a in self.adapters if all(place.adapter is not a for place in places)]
        if idle:
            raise InvalidArgument(
                f"checkpoints: expected implementations that claim `full_state_dict` and a strategy on {self.sizes} "
                f"ranks, got {', '.join(idle)}. Leave them out, or give other world sizes."
            )
        if strange := [size for size in self.sizes if all(layout.size != size for layout in LAYOUTS)]:
            there = sorted({layout.size for layout in LAYOUTS})
            raise InvalidArgument(f"checkpoints: expected world sizes of {there}, got {strange}. Leave them out.")
        return places

    def not_asked(self) -> list[str]:
        """Return the layouts and the subjects that an implementation cannot be asked for lack of claims, a sentence each."""
        places, lines = self.places(), []
        for adapter in self.adapters:
            own = [place for place in places if place.adapter is adapter]
            for subject in self.subjects:
                if not any(self.asks(place, subject) for place in own):
                    needs = min((missing(SUBJECTS[subject], place.layout, adapter) for place in own), key=len)
                    lines.append(f"{adapter.name}: {subject}; it needs {', '.join(sorted(needs))}")
            if not _has_optimizer(adapter):
                lacking = sorted({"optim_state", "optimizer_pieces"} - adapter.capabilities)
                lines.append(f"{adapter.name}: the state of the optimizer; it needs {', '.join(lacking)}")
            for layout in layouts_of(adapter):
                if layout.size in self.sizes and layout not in [place.layout for place in own]:
                    needs = min((missing(SUBJECTS[subject], layout, adapter) for subject in self.subjects), key=len)
                    lines.append(f"{adapter.name}: {layout.name}; it needs {', '.join(sorted(needs))}")
        return lines

    def asks(self, place: Place, subject: str) -> bool:
        """Return whether the implementation claims what the subject needs."""
        return not missing(SUBJECTS[subject], place.layout, place.adapter)


class Exchange:
    """One run: saves everything, then loads everything everywhere.

    Args:
        plan: The plan.
        pool: The pool that lends worlds.
        on_result: Called with every result.
    """

    def __init__(self, plan: Plan, pool: Pool, on_result: Callable[[Result], None] = lambda _: None) -> None:
        self.plan = plan
        self.places = plan.places()
        self._runner = CaseRunner(pool, timeout=plan.deadline)
        self._on_result = on_result
        self._scratch = ""
        self._batches: deque[tuple[Place, Sequence[Item]]] = deque()
        self._under_way = 0
        self._loads = False
        self._results: list[Result] = []

    @property
    def total(self) -> int:
        counts = [sum(self.plan.asks(place, subject) for place in self.places) for subject in self.plan.subjects]
        return len(self.plan.ways) * sum(count + count * count for count in counts)

    def run(self) -> list[Result]:
        """Return every result: of each saved state, and of each of its loaders.

        Ranks write to a file system in memory if the machine has one. The files are removed at the end, also after an error.
        """
        memory = Path("/dev/shm")
        usable = memory.is_dir() and os.access(memory, os.W_OK)
        self._scratch = self._runner.pool.shared_directory("fsdp-checkpoints-", str(memory) if usable else None)
        try:
            for place in self.places:
                self._queue(place, self._saved_by(place))
            search(self, self._runner.worlds, 1)
            return self._results
        finally:
            shutil.rmtree(self._scratch, ignore_errors=True)

    # ------------------------------------------------------------------------------------------- the source

    def next_job(self) -> Callable[[], list[Result]] | None:
        """Return the next batch; nothing is loaded before everything is saved and judged."""
        if not self._batches and not self._under_way and not self._loads:
            self._loads = True
            saved = list(self._results)
            for place in self.places:
                self._queue(place, self._loaded_by(place, saved))
        if not self._batches:
            return None
        self._under_way += 1
        return partial(self._judged, *self._batches.popleft())

    def take(self, answer: list[Result]) -> None:
        self._under_way -= 1
        for result in answer:
            self._add(result)

    def save(self) -> None:
        """Save nothing: `run` returns all results, and an exchange always starts over."""

    # ------------------------------------------------------------------------------------------- who does what

    def _queue(self, place: Place, items: Sequence[Item]) -> None:
        self._batches += [(place, items[at : at + ITEMS_AT_ONCE]) for at in range(0, len(items), ITEMS_AT_ONCE)]

    def _saved_by(self, place: Place) -> list[Item]:
        subjects = [subject for subject in self.plan.subjects if self.plan.asks(place, subject)]
        items = []
        for subject, way in product(subjects, self.plan.ways):
            folder = self._folder(place.name, subject, way)
            Path(folder).mkdir(parents=True)
            items.append(Item(subject, way, folder, place.name, False, _has_optimizer(place.adapter)))
        return items

    def _loaded_by(self, place: Place, saved: Sequence[Result]) -> list[Item]:
        """The states to load; a wrongly saved state is reported as such, and never loaded."""
        items = []
        carries = {p.name: _has_optimizer(p.adapter) and _has_optimizer(place.adapter) for p in self.places}
        for result in saved:
            if not self.plan.asks(place, result.subject):
                continue
            if result.verdict is Verdict.PASS:
                folder = self._folder(result.saver, result.subject, result.way)
                items.append(Item(result.subject, result.way, folder, result.saver, True, carries[result.saver]))
            else:
                self._add(replace(result, loader=place.name))
        return items

    def _folder(self, saver: str, subject: str, way: str) -> str:
        plain = "".join(c if c.isalnum() or c in "-." else "_" for c in f"{saver}+{subject}+{way}")
        return str(Path(self._scratch) / plain)

    def _add(self, result: Result) -> None:
        self._results.append(result)
        self._on_result(result)

    # ------------------------------------------------------------------------------------------- worlds

    def _judged(self, place: Place, items: Sequence[Item]) -> list[Result]:
        def run(start: int, stop: int) -> Attempt:
            return self._attempt(place, items[start:stop])

        cases = [case_of(SUBJECTS[item.subject], place.layout, place.adapter) for item in items]
        return [_result(place, item, judgement) for item, judgement in zip(items, settle(cases, run), strict=True)]

    def _attempt(self, place: Place, items: Sequence[Item]) -> Attempt:
        worlds = self._runner.worlds
        seconds = self.plan.deadline + SECONDS_PER_ITEM * len(items)
        with tempfile.TemporaryDirectory(dir=self._scratch) as directory:
            arguments = (place.adapter, place.layout, items, directory)
            spec = WorldSpec(place.layout.size)
            outcome = worlds.execute(spec, run_items, arguments, place.name, timeout=seconds, lasting=LASTING)
            return Attempt(ask_judge(worlds, judge_items, arguments, place.name), outcome)


def _result(place: Place, item: Item, judgement: Judgement) -> Result:
    finding = judgement.finding
    reason = finding.explanation if finding is not None else judgement.reason
    if judgement.loses_ranks:
        reason = next(iter(reason.splitlines()), "")
    return Result(
        item.saver,
        place.name if item.loads else "",
        item.subject,
        item.way,
        judgement.verdict,
        opening(reason, _REASON_LENGTH),
        finding is not None and _is_refusal(finding),
    )


def _is_refusal(finding: Finding) -> bool:
    """Whether every rank raised alike, in saving or loading or with NotImplementedError: no rank trains on wrong numbers."""
    early = finding.operation_text in (Stage.SAVING, Stage.LOADING) or finding.quantity == "NotImplementedError"
    return finding.kind == FailureKind.RAISED and early


def _has_optimizer(adapter: Adapter) -> bool:
    return "optim_state" in adapter.capabilities and "optimizer_pieces" in adapter.capabilities
