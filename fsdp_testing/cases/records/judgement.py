"""What is known of one case on one implementation: one record, whoever ran the case (a check, a campaign, a certificate)."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_testing.cases.records.failure import LOSES_RANKS, RAISES, FailureKind
from fsdp_testing.cases.records.finding import Finding, Overrun
from fsdp_testing.cases.records.verdict import Verdict

_MESSAGE_LENGTH = 300


@dataclass(frozen=True, slots=True)
class Tally:
    """What was compared.

    Attributes:
        comparisons: Number of tensors compared.
        worst_ratio: Largest error in units of its bound, over what passed with a bound above zero.
    """

    comparisons: int = 0
    worst_ratio: float = 0.0


NOTHING_COMPARED = Tally()


@dataclass(frozen=True, slots=True)
class Judgement:
    """What is known of one case on one implementation.

    Attributes:
        verdict: `PASS`, `FAIL` or `UNKNOWN`.
        finding: What refutes; of `FAIL` only.
        reason: Why nothing is known, in a sentence; of `UNKNOWN` only.
        detail: The rest of the reason: a traceback, the account of all ranks.
        tally: What was compared.
        account: What became of all ranks of the batch, where one was lost.
        fast: The fast path alone found everything right.
        incomplete: Not every rank reported, and nobody said what became of the others.
    """

    verdict: Verdict
    finding: Finding | None = None
    reason: str = ""
    detail: str = ""
    tally: Tally = NOTHING_COMPARED
    account: str = ""
    fast: bool = False
    incomplete: bool = False

    @property
    def why(self) -> str:
        """Return why it is no pass, in a sentence without the place."""
        finding = self.finding
        if finding is None:
            return self.reason
        if finding.kind in RAISES:
            return f"{finding.quantity}: {finding.message[:_MESSAGE_LENGTH]}"
        return finding.statement

    @property
    def overrun(self) -> Overrun | None:
        """Return the facts of a failure of kind `kept` or `excess`."""
        return self.finding.overrun if self.finding is not None else None

    @property
    def cause(self) -> str | None:
        """Return by how much communication is too much: the cause, as far as a judge knows it; None where nobody has looked."""
        return self.overrun.more if self.overrun is not None and self.overrun.more else None

    @property
    def operation(self) -> int | None:
        """Return the operation in or after which it fails; None if that is not known."""
        return self.finding.operation if self.finding is not None and not self.loses_ranks else None

    @property
    def loses_ranks(self) -> bool:
        """Whether it fails by the loss of a rank."""
        return self.finding is not None and self.finding.kind in LOSES_RANKS

    @property
    def only_model_stays(self) -> bool:
        """Whether all is right but for the model, which outlives its case."""
        return self.finding is not None and self.finding.kind == FailureKind.LEAKED and self.finding.sort == "model"
