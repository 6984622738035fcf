"""One check judges one implementation: its cases at every claimed place, merged into one result."""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.base.backends import backend_named
from fsdp_testing.cases.records import STRATEGIES, Case, CheckResult, FailureKind, Judgement, Verdict, merge
from fsdp_testing.checks.suites.check import Check, adapt, needs_of
from fsdp_testing.judging.case_runner import CaseRunner, JudgedCase
from fsdp_testing.judging.expected import NO_CASE
from fsdp_testing.oracle.tensor_axis import over_two_axes

_LARGEST_EVERYWHERE = 4
"""Ranks of the largest world that is asked whatever the backend has: hybrid sharding needs it."""
_NO_GRADIENTS = "shows no gradients (its adapter has no local_pieces), and this check judges each step by its gradients"

_NO_PIECES = (
    "gathers parameters to show them (its adapter has no local_pieces), and this check looks at what each rank holds"
)

_OWN_PARAMETERS = (
    "chooses the optimizer's parameters (its adapter has build_optimizer), which this check groups by name"
)


@dataclass(frozen=True, slots=True)
class Where:
    """The worlds of a run; `tensor_parallel` of the ranks of each hold one model together.

    Without `world_sizes` each check is asked on its own.
    """

    world_sizes: tuple[int, ...] | None = (2,)
    backend: str = "gloo"
    tensor_parallel: int = 1

    def sizes(self, *checks: Check) -> tuple[int, ...]:
        """Return the numbers of ranks on which these checks run; of their own, those beyond four only with as many devices."""
        if self.world_sizes is not None:
            return self.world_sizes
        own, backend = {size for check in checks for size in check.sizes}, backend_named(self.backend)
        return tuple(sorted(size for size in own if size <= _LARGEST_EVERYWHERE or not backend.unavailable(size)))

    def claimed(self, adapter: Adapter) -> frozenset[str]:
        """Return what an implementation claims there."""
        return adapter.claimed(self.tensor_parallel)


def judge_check(
    runner: CaseRunner,
    adapter: Adapter,
    check: Check,
    where: Where,
    *,
    stop_at_first: bool = False,
    past_hangs: bool = False,
) -> CheckResult:
    """Judge one check on one implementation.

    Args:
        runner: Runs the cases.
        adapter: The implementation, loaded by its name, which is how ranks find it and what results call it.
        check: The check.
        where: World sizes and backend.
        stop_at_first: Run no further case once one has refuted the claim.
        past_hangs: Also run the cases after a hang: an expected hang must not hide how they fail.

    Returns:
        The result; a check that crashes is `UNKNOWN` with its traceback, never an exception.
    """
    start = time.perf_counter()
    name = adapter.reference
    missing = sorted(check.needs - where.claimed(adapter))
    if missing:
        beside = " beside tensor parallelism" if adapter.capabilities >= check.needs else ""
        return _result(name, check, Verdict.NOT_CLAIMED, f"does not claim {', '.join(missing)}{beside}", start)
    if check.comparison.lockstep and not adapter.observes_gradients:
        return _result(name, check, Verdict.NOT_CLAIMED, _NO_GRADIENTS, start)
    if check.of_pieces and not adapter.observes_locally:
        return _result(name, check, Verdict.NOT_CLAIMED, _NO_PIECES, start)
    if check.by_name and "build_optimizer" not in adapter.missing:
        return _result(name, check, Verdict.NOT_CLAIMED, _OWN_PARAMETERS, start)
    try:
        cases, skipped = _cases(adapter, check, where)
    except Exception:  # noqa: BLE001 - a check's own mistake says nothing about the implementation
        return _result(name, check, Verdict.UNKNOWN, _crashed(), start)
    ends = frozenset(FailureKind) if stop_at_first else frozenset() if past_hangs else frozenset({FailureKind.HUNG})
    judgements = _judge_all(runner, adapter, cases, check, ends)
    if not judgements:
        return _result(name, check, Verdict.NOT_CLAIMED, _nothing_to_run(adapter, check, where, skipped), start)
    return replace(_merged(name, check, judgements, start), not_run=_not_run(cases, judgements, skipped))


def _judge_all(
    runner: CaseRunner, adapter: Adapter, cases: Sequence[Case], check: Check, ends: Collection[str]
) -> list[JudgedCase]:
    """Judge the cases in order, up to the first that fails in a way that `ends` the check.

    A hang ends it: the claim is refuted, and each hang costs a deadline.
    """
    judgements: list[JudgedCase] = []
    for case in cases:
        try:
            judgements.append(check.judged(runner, adapter, case))
        except Exception:  # noqa: BLE001 - it says nothing about the implementation, and takes nothing back of the other cases
            judgements.append(JudgedCase(case, Judgement(Verdict.UNKNOWN, reason=_crashed())))
        finding = judgements[-1].finding
        if finding is not None and finding.kind in ends:
            break
    return judgements


def _crashed() -> str:
    return f"the check itself crashed\n{traceback.format_exc()}"


def _cases(adapter: Adapter, check: Check, where: Where) -> tuple[list[Case], Counter[str]]:
    """Return the claimed cases, and for missing capabilities the number of cases that they exclude."""
    cases: list[Case] = []
    skipped: Counter[str] = Counter()
    for place in check.places(where.claimed(adapter), where.sizes(check), where.backend, where.tensor_parallel):
        for built in check.build(place):
            case = over_two_axes(built, where.tensor_parallel)
            missing = needs_of(case) - where.claimed(adapter)
            if missing:
                skipped[", ".join(sorted(missing))] += 1
            else:
                cases.append(adapt(case, adapter))
    return cases, skipped


def _not_run(cases: Sequence[Case], judgements: Sequence[JudgedCase], skipped: Mapping[str, int]) -> dict[str, int]:
    """How many cases were not run, by reason."""
    reasons = {f"does not claim {tags}": count for tags, count in skipped.items()}
    left = len(cases) - len(judgements)
    if not left:
        return reasons
    last = judgements[-1].finding
    hung = last is not None and last.kind == "hung"
    return reasons | {f"an earlier case of the check {'hung' if hung else 'failed'}": left}


def _nothing_to_run(adapter: Adapter, check: Check, where: Where, skipped: Iterable[str]) -> str:
    lacking = sorted(skipped)
    if lacking:
        return f"does not claim {', '.join(lacking)}"
    tags = sorted({STRATEGIES[strategy] for strategy in check.strategies})
    if not where.claimed(adapter) & set(tags):
        return f"claims none of {', '.join(tags)}"
    sizes = ", ".join(map(str, where.sizes(check)))
    possible = sorted(size * where.tensor_parallel for size, meshes in check.meshes.items() if meshes)
    return f"{NO_CASE} {sizes}; it needs {', '.join(map(str, possible)) or 'shards on several ranks'}"


def _merged(name: str, check: Check, judgements: Sequence[JudgedCase], start: float) -> CheckResult:
    outcomes = tuple(judgement.outcome for judgement in judgements)
    findings = tuple(judgement.finding for judgement in judgements if judgement.finding is not None)
    verdict = merge(outcome.verdict for outcome in outcomes)
    errors = [outcome.error for outcome in outcomes if outcome.error]
    explanation = findings[0].explanation if findings else (errors[0] if errors else "")
    return replace(_result(name, check, verdict, explanation, start), findings=findings, cases=outcomes)


def _result(name: str, check: Check, verdict: Verdict, explanation: str, start: float) -> CheckResult:
    return CheckResult(
        implementation=name,
        check=check.name,
        meaning=check.meaning,
        capabilities=tuple(sorted(check.needs)),
        verdict=verdict,
        explanation=explanation,
        seconds=time.perf_counter() - start,
    )
