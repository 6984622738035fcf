"""What is one thing that a job may leave changed? A probe: how to read it, name a change, and put it back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Reader = Callable[[], Any]
Describe = Callable[[Any, Any], Iterator[str]]
Putting = Callable[[Any, Any], None]


def _describe_plainly(before: Any, now: Any) -> Iterator[str]:
    yield f"{before!r} -> {now!r}"


@dataclass(frozen=True, slots=True)
class Probe:
    """One thing that is compared before and after a job.

    Attributes:
        kind: Word for it in a report.
        read: Returns a value that `==` compares; costs microseconds, since every job pays for it twice.
        put_back: Called with (before, now); None when only a new process is as before.
        describe: Called with (before, now); yields one text for each difference.
        collect_first: Whether garbage that awaits collection may look like a leak, so that it is collected and the
            value read again before anything is said.
    """

    kind: str
    read: Reader
    put_back: Putting | None = None
    describe: Describe = _describe_plainly
    collect_first: bool = False


@dataclass(frozen=True, slots=True)
class Setting:
    """A named value with a getter and, where it can be set, a setter."""

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], Any] | None = None


def settings_probe(kind: str, settings: Sequence[Setting]) -> Probe:
    """Return one probe over several settings: read together, named and put back one by one."""
    getters = tuple(setting.get for setting in settings)

    def read() -> list[Any]:
        return [get() for get in getters]

    def describe(before: list[Any], now: list[Any]) -> Iterator[str]:
        for setting, old, new in zip(settings, before, now, strict=True):
            if old != new:
                yield f"{setting.name}: {_short(old)} -> {_short(new)}"

    def put_back(before: list[Any], now: list[Any]) -> None:
        for setting, old, new in zip(settings, before, now, strict=True):
            if old != new and setting.set is not None:
                setting.set(old)

    return Probe(kind, read, put_back, describe)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
