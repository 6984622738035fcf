"""What diverged, where first, by how much, how it is run again, and the least that shows it."""

from __future__ import annotations

from dataclasses import dataclass, field

from fsdp_testing.base.document import ADDED_LATER
from fsdp_testing.cases.records.case import Case
from fsdp_testing.cases.records.expected import ExpectedFailure
from fsdp_testing.cases.records.failure import FailureKind, Mismatch
from fsdp_testing.cases.records.overrun import Overrun
from fsdp_testing.cases.records.portrait import Portrait


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
        complete: Whether every single operation that remains is needed; else time or runs were used up.
        place: The first module whose numbers are wrong, in a sentence; empty if none was seen.
        unexplained: Why nobody looked for its cause, where others were looked for.
        wrong_on: Ranks on which anything diverges there, where numbers were compared: those that are left out are right.
        happened: What was done wrong, as a clause of the sentence; empty where nothing that was tried gives these numbers.
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
        kind: In which way it fails.
        quantity: What diverges first, such as `gradient of blocks.1.weight`.
        operation: Index of the first operation after which it diverges; -1 while wrapping.
        operation_text: That operation in one line.
        ranks: Ranks concerned, of the quantity that leads.
        explanation: One sentence for people: the place, and the statement.
        case: The case, for the replay line.
        max_error: Largest absolute difference; None where a difference has no size (None-ness, dtype, exception).
        bound: The bound it exceeds.
        bound_derivation: How the bound came about.
        detail: Tracebacks, the account of all ranks; may be long.
        cause: Findings of one implementation with the same cause have one root cause; empty if nobody looked for it.
        shortest: The shortest schedule that shows it, on one finding of each cause.
        statement: What is wrong, without its place.
        sort: Sort of quantity (`gradient`, `value`, `optimizer exp_avg`, `output`, ...), or the type of an exception;
            empty where `quantity` is no more than that.
        fqn: Parameter or buffer; empty for results, exceptions and lost ranks.
        mismatch: In what it differs.
        message: An exception's text, or how a process ended.
        overrun: The facts of a broken rule of memory or communication.
        unexplained: Why nobody looked for its cause, where others were looked for.
        wrong_on: Ranks on which anything diverges there, where numbers were compared: those that are left out are right.
        happened: What was done wrong, as a clause, where that was asked for to know the failure again.
        expected: The entry of the user's list that it is; None for a new failure.
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
