"""The results of a run: one per implementation and check, and the report over all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fsdp_testing.base.document import ADDED_LATER, Format, decode
from fsdp_testing.cases.records import verdict as verdicts
from fsdp_testing.cases.records.finding import Finding
from fsdp_testing.cases.records.portrait import Portrait
from fsdp_testing.cases.records.verdict import Verdict
from fsdp_testing.errors import InvalidRecord

FORMAT = Format("fsdp_testing/report", 3)


@dataclass(frozen=True, slots=True)
class CaseOutcome:
    """The result of one case. `error` is set only without a verdict (`UNKNOWN`)."""

    identity: str
    verdict: Verdict
    world_size: int
    strategy: str
    seconds: float = 0.0
    worst_ratio: float = 0.0
    """Largest error divided by its bound over all comparisons that passed: how close to a failure it came."""
    comparisons: int = 0
    """Number of tensors compared; a passed case with none would be a check that cannot fail, and is `UNKNOWN`."""
    error: str = ""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check on one implementation.

    Attributes:
        implementation: Registered name or import string.
        check: Name of the check, `suite.check`.
        meaning: One line.
        capabilities: Tags that the check needs.
        verdict: After expected failures were applied.
        explanation: One sentence: the first finding, the unclaimed capability, or what is unknown.
        findings: First divergence of every failing case.
        cases: One outcome per case.
        expected: The user's reasons, if a failure was expected.
        seconds: Wall time spent.
        not_run: Number of cases that were not run, by reason.
        remark: Why a failure is not the expected one, or which expected failure did not show.
    """

    implementation: str
    check: str
    meaning: str
    capabilities: tuple[str, ...]
    verdict: Verdict
    explanation: str = ""
    findings: tuple[Finding, ...] = ()
    cases: tuple[CaseOutcome, ...] = ()
    expected: str = ""
    seconds: float = 0.0
    not_run: Mapping[str, int] = field(default_factory=dict)
    remark: str = field(default="", metadata=ADDED_LATER)

    @property
    def world_sizes(self) -> tuple[int, ...]:
        """Numbers of ranks of its cases."""
        return tuple(sorted({case.world_size for case in self.cases}))


@dataclass(frozen=True, slots=True)
class Request:
    """What a run must judge for each implementation; a part of a run has the request of the whole run.

    Attributes:
        checks: Names of the checks, in their order.
        extended: Whether the extended profile was asked for.
        expectations: Digest of the expected failures; empty if there are none.
    """

    checks: tuple[str, ...]
    extended: bool = False
    expectations: str = ""


@dataclass(frozen=True, slots=True)
class RunReport:
    """All results of a run, as one value and one JSON document.

    Attributes:
        results: The results, in the order in which they were run.
        implementations: Requested names, in that order.
        environment: Versions and machine facts that a reader needs (`torch`, `python`, `platform`, ...).
        world_sizes: Requested sizes; `CheckResult.world_sizes` has the sizes on which cases ran.
        backend: Backend run.
        seconds: Wall time of the whole run.
        portraits: Traces of a short run of implementations that report their units, if requested.
        shard: `(i, n)`: only the i-th of n parts of a run, counted from 1; empty for a whole one.
        tensor_parallel: How many ranks held one model together.
        own_names: Adapters' own names, if they differ from the requested names.
        request: The request; None in reports of earlier versions.
        since: Implementation and check -> the date since when it fails, if earlier reports were compared.
    """

    results: tuple[CheckResult, ...]
    implementations: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    world_sizes: tuple[int, ...] = ()
    backend: str = "gloo"
    seconds: float = 0.0
    portraits: tuple[Portrait, ...] = ()
    own_names: Mapping[str, str] = field(default_factory=dict)
    shard: tuple[int, ...] = ()
    tensor_parallel: int = field(default=1, metadata=ADDED_LATER)
    request: Request | None = field(default=None, metadata=ADDED_LATER)
    since: Mapping[str, str] = field(default_factory=dict, metadata=ADDED_LATER)

    @property
    def exit_code(self) -> int:
        """0 all claims hold, 1 a check failed, 3 a verdict is unknown."""
        return verdicts.exit_code(result.verdict for result in self.results)

    def count(self, verdict: Verdict) -> int:
        """Return how many results have this verdict."""
        return sum(result.verdict is verdict for result in self.results)

    def to_json(self, *, indent: int | None = None) -> str:
        """Return the report as a JSON document."""
        return FORMAT.write(self, indent=indent)

    @classmethod
    def from_json(cls, text: str, where: str = "report") -> RunReport:
        """Read a report.

        Raises:
            InvalidRecord: The document is damaged or newer than this version, or a check passes against its own cases.
        """
        report: RunReport = decode(cls, FORMAT.read(text, where), where)
        if wrong := [f"{r.implementation} {r.check}" for r in report.results if _passes_against_cases(r)]:
            raise InvalidRecord(
                f"{where}: expected checks that pass with cases that pass, got a pass with no case, or with one that does "
                f"not hold: {', '.join(wrong)}. The document was changed; run the checks again."
            )
        return report


def _passes_against_cases(result: CheckResult) -> bool:
    return result.verdict is Verdict.PASS and verdicts.merge(case.verdict for case in result.cases) is not Verdict.PASS
