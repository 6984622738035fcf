"""A known failure: how it looks, why it is there, and where it is written up. One entry of a user's list."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_testing.cases.records.failure import FailureKind


@dataclass(frozen=True, slots=True)
class ExpectedFailure:
    """One known failure of one check, and how it fails: whatever fails otherwise is new.

    Attributes:
        reason: What goes wrong, in one sentence.
        kind: In which way it fails.
        quantity: Sort of quantity that is wrong (`output`, `gradient is None`); of an exception its type and the beginning of
            its message (`ValueError: expected a`), numbers as `#` and quoted words as `_`.
        operation: Kind of the operation after which it shows (`step`), or `build` or `end`.
        parameter: Name of the parameter, as a pattern (fnmatch); empty for any.
        cause: What the account says was done instead, or a part of it, as a pattern (fnmatch); empty for any.
        page: File or address where it is written up.
        issue: Where it is reported.
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
