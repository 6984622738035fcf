"""Accounts of one cause, one known failure, or one result of a run. Each is an article of a sheet.

Where causes were searched for (`fsdp_testing.explain`), each finding names its cause. Other findings are grouped only if they
agree in every respect (kind, quantity, name, first operation, model, strategy), or if account and error are equal to the bit,
whatever the strategy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from fsdp_testing.base.documentation import text_of
from fsdp_testing.cases.records import CheckResult, Explanation, FailureKind, Finding, Portrait, RunReport, Verdict
from fsdp_testing.judging.signature import entry_line, fine_signature_of
from fsdp_testing.report import summary
from fsdp_testing.report.drawings import layout, live_bytes, timeline
from fsdp_testing.report.sheet import (
    Article,
    Block,
    Facts,
    Fold,
    Group,
    Line,
    Link,
    Listing,
    Picture,
    Steps,
    listed,
    numbered,
)

ACCOUNTS_AT_LENGTH = 4
FINDINGS = 20


class Failures:
    """The causes and known failures of a report, each with its anchor on a page."""

    def __init__(self, report: RunReport) -> None:
        self._report = report
        self._anchors = {id(result): f"r{index}" for index, result in enumerate(report.results)}
        self._causes = sorted(causes(report), key=lambda cause: cause.explanation is None)
        self.new = [(f"c{index}", cause) for index, cause in enumerate(c for c in self._causes if not c.expected)]
        self.known = [(f"k{index}", group) for index, group in enumerate(summary.known_failures(report))]

    def own(self, name: str) -> str:
        """Return the name that an adapter gives itself."""
        return self._report.own_names.get(name, name)

    def anchor(self, result: CheckResult) -> str:
        """Return where the account of a result is."""
        return self._anchors[id(result)]

    def broken(self, results: tuple[CheckResult, ...]) -> Line:
        """Return which checks something breaks."""
        several = len({result.implementation for result in results}) > 1
        links = tuple(
            Link(f"{result.check}{f' on {self.own(result.implementation)}' if several else ''}", self.anchor(result))
            for result in results
        )
        return Line(f"breaks {numbered(len(results), 'check')}:", links=links)

    def cause(self, cause: Cause, anchor: str = "", *, unfolded: bool = False) -> Article:
        """One new cause: what happens, the facts of its first finding, the schedule that shows it, and what it breaks."""
        result, finding = next(
            (result, finding)
            for result in cause.results
            for finding in result.findings
            if result.verdict is Verdict.FAIL and finding.expected is None and finding in cause.findings
        )
        explanation = cause.explanation
        how = f"; {explanation_line(explanation)}" if explanation else ""
        blocks: list[Block] = [Line(result.meaning, "meaning")] if len(cause.results) == 1 else []
        blocks += [_facts(finding, cause.sentence), _steps(cause)]
        if explanation is None and finding.detail:
            blocks.append(Listing(finding.detail))
        blocks += [self.broken(cause.results), self._replay(result), Line(f"{cause.scope}{how}", "meaning")]
        if cause.unexplained:
            blocks.append(Line(f"cause: {cause.unexplained}; --explain SECONDS looks at more", "meaning"))
        if explanation is not None:
            blocks += [Line(f"module by module: {explanation.place}", "said")] if explanation.place else []
            document = Listing(explanation.case.to_json(indent=1))
            blocks += _drawn(cause, unfolded=unfolded)
            blocks.append(Fold("The case as a document, for `fsdp-verify replay`", (document,), page_only=True))
        cost = summary.severity(cause.findings)
        return Article(cause.sentence, tuple(blocks), self.own(cause.implementation), "fail", anchor, severity=cost)

    def known_failure(self, group: summary.Known, anchor: str) -> Article:
        """One known failure, with the pages that explain it and the causes that show it."""
        own = [cause for cause in self._causes if _overlap(cause.findings, group.findings)]
        blocks: list[Block] = [Line(group.page, addresses=True)] if group.page else []
        blocks += [Line(thread, addresses=True) for thread in group.threads]
        for number, cause in enumerate(own, 1):
            which = "For instance" if len(own) == 1 else f"Cause {number} of {len(own)}"
            blocks += [Line(f"{which}: {cause.sentence}", "meaning"), _steps(cause), *_drawn(cause)]
        owners = listed(dict.fromkeys(self.own(result.implementation) for result in group.results))
        blocks.append(self.broken(group.results))
        script = group.page.replace("docs/findings/", "docs/findings/scripts/").removesuffix(".md") + ".py"
        if (text := text_of(script)) is not None:
            blocks.append(Fold("Plain torch code that shows it", (Listing(text, numbered=True),), page_only=True))
        cost = summary.severity(group.findings)
        return Article(group.reason, tuple(blocks), owners, Verdict.EXPECTED_FAILURE.value, anchor, severity=cost)

    def result(self, result: CheckResult, findings: int = FINDINGS) -> Article:
        """Everything that a reader needs to know about one result other than a plain pass."""
        verdict = result.verdict
        blocks: list[Block] = [Line(result.meaning, "meaning"), Line(summary.sentence(result), "said")]
        if result.expected:
            because = "expected because" if verdict is Verdict.EXPECTED_FAILURE else "listed as known"
            blocks.append(Line(f"{because}: {result.expected}", addresses=True))
        if result.remark:
            blocks.append(Line(result.remark, "said"))
        elif verdict is Verdict.FAIL and result.findings:
            blocks.append(entry(result))
        for word, groups in (("Cause", self.new), ("Known", self.known)):
            for anchor, group in groups:
                if _overlap(result.findings, group.findings):
                    blocks.append(Line(f"{word}:", "meaning", links=(Link(group.sentence, anchor),)))
        if result.findings:
            at_length = result.findings[:findings]
            cases: list[Block] = [
                Group(tuple(_case(finding, result, len(at_length))), "finding") for finding in at_length
            ]
            left = len(result.findings) - findings
            cases += [Line(f"{left} more failing cases are in the JSON report")] if left > 0 else []
            title = numbered(len(result.findings), "failing case")
            blocks.append(Fold(title, tuple(cases), unfolded=verdict is not Verdict.EXPECTED_FAILURE))
        for index, account in enumerate(summary.accounts(result)):
            blocks.append(Fold("Reason for no verdict", (Listing(account),), unfolded=index < ACCOUNTS_AT_LENGTH))
        blocks.append(self._replay(result))
        owner = self.own(result.implementation)
        return Article(result.check, tuple(blocks), owner, verdict.value, self.anchor(result))

    def _replay(self, result: CheckResult) -> Line:
        return Line("replay:", command=summary.replay_line(result, self._report))


def _overlap(some: tuple[Finding, ...], others: tuple[Finding, ...]) -> bool:
    """Whether a finding is in both; by identity, because comparing equal findings takes long."""
    return not {id(finding) for finding in some}.isdisjoint(map(id, others))


def _facts(finding: Finding, sentence: str) -> Facts:
    """The facts of a failing case; `sentence` has already been shown to the reader."""
    pairs = {
        str(finding.kind): finding.explanation if finding.explanation != sentence else "",
        "first at": summary.place_text(finding),
        "tensor" if finding.max_error is not None else "what": finding.quantity,
        "size": summary.size_text(finding),
        "bound": finding.bound_derivation,
        "case": f"{finding.case.identity}: {summary.world_text(finding.case)}",
    }
    return Facts(tuple((name, value) for name, value in pairs.items() if value))


def _case(finding: Finding, result: CheckResult, of: int) -> Iterator[Block]:
    """The facts of a failing case, with the full account of the ranks if it is the only case."""
    yield _facts(finding, summary.sentence(result))
    if finding.detail:
        yield Fold("Account of all ranks", (Listing(finding.detail),), unfolded=of == 1)
    document = Listing(finding.case.to_json(indent=1))
    yield Fold(f"Case {finding.case.identity} as a document", (document,), page_only=True)


def entry(result: CheckResult, *, unfolded: bool = False) -> Fold:
    """The entry that you paste into the list of expected failures, if the failure is known."""
    # With tensor parallelism a separate table of the implementation applies (`cli.run.expectations`).
    beside = any(finding.case.world.tensor_parallel > 1 for finding in result.findings)
    name = result.implementation
    # Only letters, digits, `_` and `-` stand in TOML without quotes: MODULE:ATTRIBUTE has others.
    name = name if re.fullmatch(r"[\w-]+", name, re.ASCII) else json.dumps(name)
    table = name + ".tensor_parallel" * beside
    title = f"To expect this failure, add to --expected-failures under [{table}]:"
    return Fold(title, (Listing(entry_line(result.check, result.findings), whole=True),), unfolded=unfolded)


def _steps(cause: Cause) -> Steps:
    """Return the shortest schedule with the moment at which it goes wrong; without one, the operation of the finding."""
    finding = next((finding for finding in cause.findings if finding.shortest is not None), cause.findings[0])
    everyone = range(finding.case.world.size)
    wrong = finding.wrong_on or finding.ranks or tuple(everyone)
    # A rank is right if its numbers were compared and agree. A rank that waits for another, or that another contradicts, may be
    # right.
    others = False if finding.wrong_on and finding.kind == FailureKind.DIVERGED else None
    ranks = tuple((rank, True if rank in wrong else others) for rank in everyone)
    sentence = finding.statement or finding.explanation
    if cause.explanation is None:
        return Steps((summary.operation_place(finding),), 0, ranks, sentence, single=True)
    lines = cause.explanation.schedule
    # The schedule was shortened after the finding, so the index of the operation may have changed.
    wanted = _without_number(finding.operation_text.removeprefix("operation "))
    like = [index for index, line in enumerate(lines) if _without_number(line) == wanted]
    return Steps(lines, like[-1] if like else None, ranks, sentence)


def _without_number(line: str) -> str:
    number, _, rest = line.partition(" ")
    return rest if number.isdigit() else line


def _drawn(cause: Cause, *, unfolded: bool = False) -> list[Block]:
    if cause.explanation is None or cause.explanation.portrait is None:
        return []
    pictures = drawings(cause.explanation.portrait, _steps(cause).wrong)
    return [Fold("Drawing: computation, communication and waits", pictures, unfolded=unfolded, page_only=True)]


def drawings(portrait: Portrait, wrong: int | None = None) -> tuple[Picture, ...]:
    """Return the drawings of activity, memory and layout; `wrong` is the index of an operation."""
    does, held = f"{timeline.account(portrait)}.", f"{live_bytes.account(portrait)}: {portrait.bound_text}."
    units = f"{len(portrait.units)} units on {len(portrait.ranks)} ranks; padding is hatched."
    return (
        Picture(timeline.timeline(portrait, wrong), does, "Timeline", "What each rank does.", timed=True),
        Picture(live_bytes.live_bytes(portrait), held, "Bytes held", "Parameters held."),
        Picture(layout.layout(portrait), units, "Shard layout", "Where the elements live."),
    )


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
