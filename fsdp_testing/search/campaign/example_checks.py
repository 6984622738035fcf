"""Examples of known failures, which run before all other cases, within a share of the campaign."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from fsdp_testing.cases.records import ENDS_RANKS, Case, FailureKind, Verdict
from fsdp_testing.judging.batch import Watch
from fsdp_testing.judging.case_runner import JudgedCase
from fsdp_testing.judging.known import KnownFailures, Rule

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
