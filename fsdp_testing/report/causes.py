"""The root causes of the failures in a report. Pure: findings grouped, one account for each group.

Where causes were searched for (`fsdp_testing.explain`), each finding names its cause. Other findings are grouped only if they
agree in every respect (kind, quantity, name, first operation, model, strategy), or if account and error are equal to the bit,
whatever the strategy.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_testing.cases.records import CheckResult, Explanation, Finding, RunReport, Verdict
from fsdp_testing.judging.signature import fine_signature_of


@dataclass(frozen=True, slots=True)
class Cause:
    """One root cause on one implementation.

    Attributes:
        implementation: The implementation.
        sentence: What happens.
        results: The checks that it breaks, in the order of the run.
        findings: All findings that it explains.
        explanation: The shortest schedule, if it was looked for.
        expected: Whether all of it was expected; else some of it is new.
    """

    implementation: str
    sentence: str
    results: tuple[CheckResult, ...]
    findings: tuple[Finding, ...]
    explanation: Explanation | None
    expected: bool

    @property
    def unexplained(self) -> str:
        """Why the cause was not searched for; empty if it was, or if no search was requested."""
        return "" if self.explanation else next((f.unexplained for f in self.findings if f.unexplained), "")

    @property
    def scope(self) -> str:
        """The models and strategies that show it."""
        models = ", ".join(dict.fromkeys(finding.case.model.name for finding in self.findings))
        strategies = ", ".join(dict.fromkeys(finding.case.strategy for finding in self.findings))
        cases = len(self.findings)
        return f"{cases} failing case{'s' if cases > 1 else ''}: {models}; {strategies}"


def causes(report: RunReport) -> tuple[Cause, ...]:
    """Return the root causes, unexpected ones first, then in the order of the run."""
    groups: dict[tuple[str, object], list[tuple[CheckResult, Finding]]] = {}
    alike: dict[tuple[object, ...], object] = {}
    for result in report.results:
        for finding in result.findings:
            key: object = finding.cause
            if not finding.cause:
                words = (
                    result.implementation,
                    finding.quantity,
                    finding.explanation,
                    finding.max_error,
                    result.verdict,
                )
                key = alike.setdefault(words, fine_signature_of(finding))
            groups.setdefault((result.implementation, key), []).append((result, finding))
    grouped = [_cause(name, members) for (name, _), members in groups.items()]
    return tuple(sorted(grouped, key=lambda cause: cause.expected))


def _cause(name: str, members: list[tuple[CheckResult, Finding]]) -> Cause:
    results = {result.check: result for result, _ in members}
    findings = tuple(finding for _, finding in members)
    explanation = next((finding.shortest for finding in findings if finding.shortest is not None), None)
    return Cause(
        implementation=name,
        sentence=explanation.sentence if explanation is not None else findings[0].explanation,
        results=tuple(results.values()),
        findings=findings,
        explanation=explanation,
        expected=all(result.verdict is not Verdict.FAIL or finding.expected is not None for result, finding in members),
    )


def explanation_line(explanation: Explanation) -> str:
    """Return how the shortest schedule was found, in a line."""
    operations = len(explanation.schedule)
    if not explanation.runs:
        return f"{operations} operations, as the check ran them"
    noun = "operation remains" if operations == 1 else "operations remain"
    left = f"{operations} {noun}, {explanation.left_out} left out"
    certain = "each that remains is needed" if explanation.complete else "not all were tried (time)"
    return (
        f"{left}; {certain} ({explanation.runs} run{'s' if explanation.runs > 1 else ''}, {explanation.seconds:.1f} s)"
    )
