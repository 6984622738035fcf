"""Findings: what diverged first, where, by how much, how to run it again, its shortest schedule, and expected failures.

A case on an implementation has one judgement, whether a check, a campaign or a certificate ran it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from fsdp_testing.base.document import ADDED_LATER
from fsdp_testing.cases.records.case import Case
from fsdp_testing.cases.records.portrait import Portrait
from fsdp_testing.cases.records.verdict import LOSES_RANKS, RAISES, FailureKind, Mismatch, Verdict


class Measure(enum.StrEnum):
    """What is counted."""

    KEPT_PARAMETERS = "kept_parameters"
    """Bytes of full parameters that are in memory when the operation ends."""
    UNIT_GATHERS = "unit_gathers"
    """How often one unit is gathered."""
    GATHERED_BYTES = "gathered_bytes"
    """Bytes that all-gathers give on one rank."""
    REDUCTIONS = "reductions"
    """How often gradients are reduced."""


_QUANTITIES = {
    Measure.KEPT_PARAMETERS: "full parameters",
    Measure.UNIT_GATHERS: "gathers",
    Measure.GATHERED_BYTES: "gathers",
    Measure.REDUCTIONS: "reductions",
}


@dataclass(frozen=True, slots=True)
class Overrun:
    """More memory or communication than one operation may take.

    Attributes:
        measure: The rule that is broken.
        operation: Index of the operation, or for memory of the operation before; -1 for wrapping.
        rank: On which rank.
        measured: Amount, in bytes or times; 0 for memory of unknown size.
        limit: Allowed amount, in the same unit.
        units: Units concerned (FQN, the root's is empty), each with its bytes (0: not known); empty if the whole
            model is meant.
        before: All of `units` were gathered before the operation began, and it gathered none of them itself.
    """

    measure: Measure
    operation: int
    rank: int
    measured: int
    limit: int
    units: tuple[tuple[str, int], ...] = ()
    before: bool = field(default=False, metadata=ADDED_LATER)

    @property
    def kind(self) -> FailureKind:
        """Kind of failure: `kept` (memory) or `excess` (communication)."""
        return FailureKind.KEPT if self.measure is Measure.KEPT_PARAMETERS else FailureKind.EXCESS

    @property
    def quantity(self) -> str:
        """The thing in excess: `full parameters`, `gathers`, `reductions`."""
        return _QUANTITIES[self.measure]

    @property
    def sentence(self) -> str:
        """The whole overrun in words."""
        if self.measure is Measure.KEPT_PARAMETERS:
            units = ", ".join(f"{unit or '(root)'}{f' ({size} bytes)' if size else ''}" for unit, size in self.units)
            return f"full parameters stay gathered on rank {self.rank}: {units}"
        if self.measure is Measure.UNIT_GATHERS:
            unit = self.units[0][0] or "(root)"
            return f"unit {unit} is gathered {self.measured} times on rank {self.rank}, {self.limit} would be enough"
        if self.measure is Measure.GATHERED_BYTES:
            most = f"{self.limit} with all padding would be enough"
            return f"{self.measured} bytes are gathered on rank {self.rank}, {most}"
        return f"{self.measured} reductions are issued on rank {self.rank}, {self.limit} would be enough"

    @property
    def more(self) -> str:
        """The excess, without unit and rank; empty for memory."""
        times = self.measured - self.limit
        stays = (
            "memory gathered before the operation stays" if self.before else "memory that the operation gathers stays"
        )
        return {
            Measure.KEPT_PARAMETERS: stays,
            Measure.UNIT_GATHERS: f"a unit is gathered {times} times more than would be enough",
            Measure.GATHERED_BYTES: f"{times} bytes more are gathered than would be enough",
            Measure.REDUCTIONS: f"gradients are reduced {times} times more than would be enough",
        }[self.measure]


@dataclass(frozen=True, slots=True)
class ExpectedFailure:
    """One known failure of one check, and how it fails: a failure of any other kind is new.

    Attributes:
        reason: The defect in one sentence.
        kind: Kind of failure.
        quantity: Sort of quantity that is wrong (`output`, `gradient is None`); for an exception its type and the start of
            its message (`ValueError: expected a`), numbers as `#` and quoted words as `_`.
        operation: Kind of the operation after which it shows (`step`), or `build` or `end`.
        parameter: Name of the parameter, as a pattern (fnmatch); empty for any.
        cause: What was done instead, according to the account, or a part of it, as a pattern (fnmatch); empty for any.
        page: File or address that describes it.
        issue: Address of its report.
    """

    reason: str
    kind: FailureKind
    quantity: str = ""
    operation: str = ""
    parameter: str = ""
    cause: str = ""
    page: str = ""
    issue: str = ""

    @property
    def look(self) -> str:
        """How it fails, in a line."""
        where = f" in {self.operation}" if self.operation else ""
        which = f" of {self.parameter}" if self.parameter else ""
        return f"{self.kind} {self.quantity}".strip() + which + where + (f" ({self.cause})" if self.cause else "")

    @property
    def text(self) -> str:
        """The reason, with where it is written up and reported."""
        places = ", ".join(filter(None, (self.page, self.issue)))
        return f"{self.reason}: {places}" if places else self.reason


@dataclass(frozen=True, slots=True)
class Explanation:
    """A failure, reduced to the shortest schedule of operations that still shows it, with a sentence about it.

    Attributes:
        sentence: What happens, with numbers and bound.
        schedule: The operations that remain, one line each.
        case: The case with only these operations.
        left_out: How many operations of the original program are not needed.
        runs: How many programs were run to find out.
        seconds: Time that took.
        complete: Whether every remaining operation is needed; otherwise time or runs were used up.
        place: The first module whose numbers are wrong, in a sentence; empty if none was seen.
        unexplained: Why its cause was not examined, if other causes were.
        wrong_on: Ranks on which anything diverges there, if numbers were compared: all other ranks are right.
        happened: What was done wrong, as a clause of the sentence; empty if no tried mistake gives these numbers.
        portrait: The shortest schedule as it ran, if the implementation can be traced.
    """

    sentence: str
    schedule: tuple[str, ...]
    case: Case
    left_out: int
    runs: int
    seconds: float
    complete: bool
    place: str = ""
    portrait: Portrait | None = None
    happened: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """One failure of one case.

    Attributes:
        kind: The kind of failure.
        quantity: What diverges first, such as `gradient of blocks.1.weight`.
        operation: Index of the first operation after which it diverges; -1 while wrapping.
        operation_text: That operation in one line.
        ranks: Ranks on which the leading quantity is wrong.
        explanation: One sentence for people: the place, and the statement.
        case: The case, for the replay line.
        max_error: Largest absolute difference; None if the difference has no size (None-ness, dtype, exception).
        bound: The bound it exceeds.
        bound_derivation: Derivation of the bound.
        detail: Tracebacks, the account of all ranks; may be long.
        cause: Findings of one implementation with the same cause have one root cause; empty if it was not examined.
        shortest: The shortest schedule that shows it, on one finding of each cause.
        statement: The fault, without its place.
        sort: Sort of quantity (`gradient`, `value`, `optimizer exp_avg`, `output`, ...), or the type of an exception; empty
            where `quantity` says the same.
        fqn: Parameter or buffer; empty for results, exceptions and lost ranks.
        mismatch: How it differs.
        message: An exception's text, or how a process ended.
        overrun: The facts of a broken rule of memory or communication.
        unexplained: Why its cause was not examined, if other causes were.
        wrong_on: Ranks on which anything diverges there, if numbers were compared: all other ranks are right.
        happened: What was done wrong, as a clause, if a rule needed it to recognise the failure.
        expected: The matching entry of the user's list; None for a new failure.
        refused: The implementation refuses by NotImplementedError.
    """

    kind: FailureKind
    quantity: str
    operation: int
    operation_text: str
    ranks: tuple[int, ...]
    explanation: str
    case: Case
    max_error: float | None = None
    bound: float | None = None
    bound_derivation: str = ""
    detail: str = ""
    cause: str = ""
    shortest: Explanation | None = None
    statement: str = ""
    sort: str = ""
    fqn: str = ""
    mismatch: Mismatch = Mismatch.NUMBERS
    message: str = ""
    overrun: Overrun | None = None
    wrong_on: tuple[int, ...] = field(default=(), metadata=ADDED_LATER)
    happened: str = field(default="", metadata=ADDED_LATER)
    expected: ExpectedFailure | None = field(default=None, metadata=ADDED_LATER)
    unexplained: str = field(default="", metadata=ADDED_LATER)
    refused: bool = field(default=False, metadata=ADDED_LATER)


_MESSAGE_LENGTH = 300


def opening(text: str, most: int) -> str:
    """Return a text, or whole words from its beginning, of at most `most` characters, with an ellipsis for the rest."""
    return text if len(text) <= most else f"{text[:most].rsplit(' ', 1)[0]} …"


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
    """The judgement of one case on one implementation.

    Attributes:
        verdict: `PASS`, `FAIL` or `UNKNOWN`.
        finding: The finding that refutes the claim; only for `FAIL`.
        reason: Reason for no verdict, in a sentence; only for `UNKNOWN`.
        detail: The rest of the reason: a traceback, the account of all ranks.
        tally: What was compared.
        account: Fate of all ranks of the batch, if one was lost.
        fast: The fast path alone found everything right.
        incomplete: Not every rank reported, and the fate of the others is unknown.
        parted: Ranks issued different collectives, whatever the verdict: later cases of the batch show nothing.
    """

    verdict: Verdict
    finding: Finding | None = None
    reason: str = ""
    detail: str = ""
    tally: Tally = NOTHING_COMPARED
    account: str = ""
    fast: bool = False
    incomplete: bool = False
    parted: bool = False

    @property
    def why(self) -> str:
        """Return why it does not pass, in a sentence without the place."""
        finding = self.finding
        if finding is None:
            return self.reason
        if finding.kind in RAISES:
            return f"{finding.quantity}: {opening(finding.message, _MESSAGE_LENGTH)}"
        return finding.statement

    @property
    def overrun(self) -> Overrun | None:
        """Return the facts of a failure of kind `kept` or `excess`."""
        return self.finding.overrun if self.finding is not None else None

    @property
    def cause(self) -> str | None:
        """Return the excess of communication: the cause, as far as a judge knows it; None if it was not examined."""
        return self.overrun.more if self.overrun is not None and self.overrun.more else None

    @property
    def operation(self) -> int | None:
        """Return the operation in or after which it fails; None if that is not known."""
        return self.finding.operation if self.finding is not None and not self.loses_ranks else None

    @property
    def loses_ranks(self) -> bool:
        """Whether the failure is the loss of a rank."""
        return self.finding is not None and self.finding.kind in LOSES_RANKS

    @property
    def only_model_stays(self) -> bool:
        """Whether everything is right except that the model outlives its case."""
        return self.finding is not None and self.finding.kind == FailureKind.LEAKED and self.finding.sort == "model"
