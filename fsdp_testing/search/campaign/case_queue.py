"""The order of cases in a campaign: first examples of known failures, within a share of its time; then drawn cases.

Each drawn case runs once; cases that may kill ranks come rarely, but all of them run.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from fsdp_testing.cases.records import ENDS_RANKS, Case, FailureKind, Verdict
from fsdp_testing.judging.batch import Watch
from fsdp_testing.judging.case_runner import JudgedCase
from fsdp_testing.judging.known import KnownFailures, Rule
from fsdp_testing.search.loop import Budget
from fsdp_testing.search.state import Verdicts

BATCH = 24
COSTLY_ONE_IN = 20
"""While other cases wait, at most this many cases that may kill ranks are run."""
_COSTLY_AT_ONCE = 2
_VARIANTS_OF_ONE = 2


class QueuedCase(NamedTuple):
    """A case to run.

    Attributes:
        case: The case.
        number: The number from which it was drawn; None for a variant.
        depth: 0 for a drawn case; 1 for a variant of a case with a known failure, 2 for a variant of such a variant.
        origin: Number of the case of which it is a variant.
    """

    case: Case
    number: int | None = None
    depth: int = 0
    origin: int | None = None


class CaseQueue:
    """Hands out batches of cases for one world size each.

    Args:
        draw: Gives the case of a number.
        verdicts: The verdicts on drawn cases. Cases that an earlier run drew but did not finish come first.
        budget: Cases and time; the time is checked before each case.
    """

    def __init__(self, draw: Callable[[int], Case], verdicts: Verdicts, budget: Budget) -> None:
        self._draw = draw
        self._verdicts = verdicts
        self._budget = budget
        self._resumed = deque(verdicts.numbers(None))
        self._postponed: deque[int] = deque()
        self._waiting: dict[int, list[QueuedCase]] = {}
        self._costly: dict[int, list[QueuedCase]] = {}
        self._others = 0
        self._in_a_row = 0
        self.postponed: Counter[str] = Counter()

    def add_variant(
        self, of: QueuedCase, rule: Rule, shape: Callable[[Case], Case], fair: Callable[[Case], bool]
    ) -> bool:
        """Queue the case without the cause of a known failure; return whether there is such a case."""
        variant = rule.variant(of.case) if of.depth < _VARIANTS_OF_ONE else None
        shaped = shape(variant) if variant is not None else None
        if shaped is None or not shaped.program or not fair(shaped):
            return False
        self._waiting.setdefault(shaped.world.size, []).append(
            QueuedCase(shaped, None, of.depth + 1, of.origin if of.number is None else of.number)
        )
        return True

    def next_batch(self, known: KnownFailures) -> list[QueuedCase]:
        """Return the next batch, the cases that may cost the ranks last; empty when the time or the cases are over."""
        while not self._budget.time_is_up():
            full = [size for size, cases in self._waiting.items() if len(cases) >= BATCH]
            full += [size for size, cases in self._costly.items() if len(cases) >= _COSTLY_AT_ONCE]
            if full:
                return self._take(full[0])
            if not self._fill(known):
                sizes = [*self._waiting, *self._costly]
                return self._take(sizes[0]) if sizes else []
        return []

    def _take(self, size: int) -> list[QueuedCase]:
        waiting = self._waiting.pop(size, [])
        if waiting[BATCH:]:
            self._waiting[size] = waiting[BATCH:]
        # Cases after one that kills its ranks run again on new ranks, so such cases come last.
        return waiting[:BATCH] + self._costly.pop(size, [])

    def _fill(self, known: KnownFailures) -> bool:
        """Queue one more case; return whether there was one."""
        number = self._next_number()
        if number is None:
            return self._take_postponed()
        case = self._draw(number)
        rule = known.may_end_ranks(case)
        if rule is None:
            self._waiting.setdefault(case.world.size, []).append(QueuedCase(case, number))
            self._others += 1
            self._in_a_row = 0
        else:
            self.postponed[rule.name] += 1
            self._postponed.append(number)
            self._in_a_row += 1
        if self._postponed and max(self._others, self._in_a_row) >= COSTLY_ONE_IN:
            self._take_postponed()
        return True

    def _next_number(self) -> int | None:
        if self._resumed:
            return self._resumed.popleft()
        if self._budget.enough:
            return None
        self._budget.begun += 1
        return self._verdicts.add_case()

    def _take_postponed(self) -> bool:
        self._others = self._in_a_row = 0
        if not self._postponed:
            return False
        number = self._postponed.popleft()
        case = self._draw(number)
        self._costly.setdefault(case.world.size, []).append(QueuedCase(case, number))
        return True


SHARE = 0.2
"""Part of the time, or of the cases, of a campaign that examples may take."""
EXAMPLE_SECONDS = 5.0
"""Seconds after which an example counts as hung."""
_AT_ONCE = 8

JudgeBatch = Callable[[list[Case], Watch], list[JudgedCase]]


@dataclass(slots=True)
class Checked:
    """The results of the examples.

    Attributes:
        ran: Rules whose example ran.
        still: Rules whose example fails as they say.
        gone: Rules whose example passes.
        changed: Examples that fail in a way that their rule does not know.
        undecided: Rules whose example gives no verdict, or loses ranks although the rule does not say so.
        left: How many examples did not run.
    """

    ran: list[str] = field(default_factory=list)
    still: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    changed: list[JudgedCase] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    left: int = 0


def check_examples(
    judge: JudgeBatch,
    known: KnownFailures,
    turns: Mapping[str, int],
    fair: Callable[[Case], bool],
    allowed: Callable[[int], bool],
    always: Collection[str] = (),
) -> Checked:
    """Run examples, first those that have waited for the most campaigns.

    Args:
        judge: Runs them and judges them.
        known: The known failures with their examples.
        turns: Number of the campaign in which the example of each rule ran last.
        fair: Whether the implementation claims everything that a case needs.
        allowed: Whether there is time for more, after so many examples.
        always: Rules whose example runs before all others, and each time.
    """
    due = [(rule, case) for rule, case in known.examples() if fair(case)]
    due.sort(key=lambda pair: turns.get(pair[0].name, -1))
    own, others = [pair for pair in due if pair[0].name in always], [pair for pair in due if pair[0].name not in always]
    checked = Checked()
    for chunk in (*_alike(own), *_alike(others)):
        if chunk[0][0].name not in always:
            few = (count for count in range(len(chunk), 0, -1) if allowed(len(checked.ran) + count))
            chunk = chunk[: next(few, 0)]
        if not chunk:
            break
        watch = Watch(operations=True, models=_leaks(chunk[0][0]))
        results = judge([case for _, case in chunk], watch)
        for (rule, _), judged in zip(chunk, results, strict=True):
            _sort_in(checked, rule, judged)
    checked.left = len(due) - len(checked.ran)
    return checked


def _sort_in(checked: Checked, rule: Rule, judged: JudgedCase) -> None:
    checked.ran.append(rule.name)
    signature, judgement = judged.signature, judged.judgement
    if signature is not None and KnownFailures((rule,)).recognize(signature, judged.features):
        checked.still.append(rule.name)
    elif judged.verdict is Verdict.PASS or judgement.only_model_stays:
        checked.gone.append(rule.name)
    elif signature is not None and signature.kind not in ENDS_RANKS:
        # Late ranks on a crowded machine say nothing about a rule; a different wrong number does.
        checked.changed.append(judged)
    else:
        checked.undecided.append(rule.name)


def _alike(due: list[tuple[Rule, Case]]) -> list[list[tuple[Rule, Case]]]:
    """The examples in chunks that one batch can run, in the order in which they are due."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for place, (rule, case) in enumerate(due):
        # A failure that kills its ranks makes all later cases of its batch run again.
        alone = rule.name if rule.ends_ranks or _leaks(rule) else ""
        alike.setdefault((case.world.size, alone), []).append(place)
    chunks = [places[at : at + _AT_ONCE] for places in alike.values() for at in range(0, len(places), _AT_ONCE)]
    return [[due[place] for place in chunk] for chunk in sorted(chunks)]


def _leaks(rule: Rule) -> bool:
    return any(FailureKind(signature[0]) is FailureKind.LEAKED for signature in rule.signatures)
