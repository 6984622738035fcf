"""What a fault is: a line of text, `crash@rank=1,step=40`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Protocol

from fsdp_testing.errors import InvalidArgument

FIRST = {"collective": 1, "step": 0, "save": 1, "load": 1}
"""The places of a fault, and the number of the first one: collectives are counted as the ledger does, steps as `train` does."""
_EVERYWHERE = tuple(FIRST)
_KINDS = {
    "crash": _EVERYWHERE,
    "hang": _EVERYWHERE,
    "stop": _EVERYWHERE,
    "delay": _EVERYWHERE,
    "corrupt": ("collective", "step", "save"),
    "drop": ("collective",),
    "reorder": ("collective",),
    "slow-disk": ("", *_EVERYWHERE),
    "full-disk": ("", *_EVERYWHERE),
    "memory": ("", *_EVERYWHERE),
    "clock": ("", *_EVERYWHERE),
}
OF_CALLS = ("corrupt", "drop", "reorder")
SILENT = ("crash", "hang", "stop")
"""After one of these a rank does nothing more."""
NOT_ISSUED = {"drop", "reorder"}
"""These keep a collective from being issued where it is called."""
_SIZES = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_NUMBER = r"\d+(?:\.\d+)?"
_VALUES = {
    "delay": _NUMBER,
    "slow-disk": _NUMBER,
    "memory": rf"{_NUMBER}(?:{'|'.join(_SIZES)})",
    "clock": rf"[+-]{_NUMBER}",
}
_TEXT = re.compile(r"([a-z-]+)(?:=([^@]+))?(?:@(.*))?")
FORMS = (
    "KIND@rank=R,PLACE=N, with KIND one of crash, hang, stop, delay=SECONDS, corrupt, drop, reorder, slow-disk=SECONDS, "
    "full-disk, memory=256MiB, clock=+SECONDS, and PLACE one of collective (from 1), step (from 0), save, load (from 1); without "
    "rank= every rank; the last four kinds need no place; drop and reorder take a collective, corrupt no load"
)


MARK = "injected fault"
"""The start of the line that a rank writes to its standard error when it injects a fault."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault as its text says it.

    Attributes:
        kind: What happens.
        value: Seconds or bytes, where the kind has any.
        rank: On which rank; None for every rank.
        place: One of "collective", "step", "save" or "load"; empty for at once.
        at: The number of that place.
        text: As it was written.
    """

    kind: str
    value: float
    rank: int | None
    place: str
    at: int
    text: str

    @classmethod
    def parse(cls, text: str, size: int | None = None) -> Fault:
        """Read a fault, for a world of `size` ranks where there is one yet.

        Raises:
            InvalidArgument: The text is not a fault, or the world has no such rank; the message lists kinds and places.
        """
        match = _TEXT.fullmatch(text)
        kind, value, places = match.groups() if match else ("", None, None)
        pairs = [part.partition("=")[::2] for part in ([] if places is None else places.split(","))]
        numbers = {name: int(number) for name, number in pairs if re.fullmatch(r"[0-9]{1,9}", number)}
        rank = numbers.pop("rank", None)
        place, at = next(iter(numbers.items()), ("", 0))
        sound = match is not None and len(numbers) <= 1 and len(pairs) == len(numbers) + (rank is not None)
        sound = sound and place in _KINDS.get(kind, ()) and at >= FIRST.get(place, 0)
        if (
            not sound
            or (value is None) != (kind not in _VALUES)
            or not re.fullmatch(_VALUES.get(kind, ""), value or "")
        ):
            raise InvalidArgument(f"fault: expected {FORMS}; got {text!r}.")
        if size is not None and rank is not None and rank >= size:
            raise InvalidArgument(f"fault: expected a rank from 0 to {size - 1}, got {rank} in {text!r}.")
        unit = next((unit for unit in _SIZES if value and value.endswith(unit)), "")
        amount = float((value or "0").removesuffix(unit)) * _SIZES.get(unit, 1)
        return cls(kind, amount, rank, place, at, text)

    def reached_in(self, output: str) -> bool:
        """Return whether a rank's standard error says that the rank reached this fault."""
        return f"{MARK} {self.text} is here" in output

    def __str__(self) -> str:
        return self.text


def check_together(faults: Sequence[Fault]) -> None:
    """Refuse two faults at one place of one rank if the first rules out the second; other faults happen in their order.

    Raises:
        InvalidArgument: A fault rules out a later one.
    """
    for first, second in combinations(faults, 2):
        if (first.place, first.at) != (second.place, second.at) or not first.place:
            continue
        if None not in (first.rank, second.rank) and first.rank != second.rank:
            continue
        if first.kind in SILENT:
            raise InvalidArgument(
                f"fault: expected {second} to happen, got {first} before it, after which the rank does nothing. Give "
                "them in the other order, or name another place."
            )
        if {first.kind, second.kind} <= NOT_ISSUED:
            raise InvalidArgument(
                f"fault: expected a collective that is either dropped or comes later, got {first} and {second}. Name another "
                "place for one of them."
            )


class Active(Protocol):
    """An injection that lasts."""

    def come_to(self, place: str, what: str) -> None:
        """Count the next of these places, and inject the faults that are due there."""

    def end(self) -> list[Fault]:
        """Put everything back, and return the faults that were not reached."""


active: list[Active] = []
"""The injections of this process, in the order in which they began."""


def end_all() -> list[Fault]:
    """End the injections of this process, the last one first, and return the faults that were not reached."""
    return [fault for injection in reversed(list(active)) for fault in injection.end()]


def never_reached(faults: Sequence[Fault]) -> str:
    """Return the sentence on faults that were not reached."""
    names = ", ".join(map(str, faults))
    advice = (
        "Name an earlier one." if any(fault.place for fault in faults) else "Save or load by torch.save or torch.load."
    )
    return f"fault {names}: expected a place that is reached, but the run ended before it. {advice}"
