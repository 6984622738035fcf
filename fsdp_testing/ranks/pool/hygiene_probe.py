"""What is one thing that a job may leave changed? A probe: how to read it, name a change, and put it back.

Two kinds cover nearly all: settings, which have a value, and things of which there may be more than before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Reader = Callable[[], Any]
Describe = Callable[[Any, Any], Iterator[str]]
Putting = Callable[[Any, Any], None]


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
    describe: Describe = lambda before, now: iter([f"{before!r} -> {now!r}"])
    collect_first: bool = False


@dataclass(frozen=True, slots=True)
class Setting:
    """A named value with a getter and, where it can be set, a setter."""

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], Any] | None = None


def attribute(owner: Any, name: str, label: str = "") -> Setting:
    """Return the setting that an attribute of a module, class or object is."""
    label = label or f"{getattr(owner, '__name__', type(owner).__name__)}.{name}"
    return Setting(label, lambda: getattr(owner, name), lambda value: setattr(owner, name, value))


def list_attribute(owner: Any, name: str, label: str = "") -> Setting:
    """Return the setting that the contents of a list are; putting them back keeps the list itself."""
    label = label or f"{owner.__name__}.{name}"
    return Setting(
        label, lambda: list(getattr(owner, name)), lambda value: getattr(owner, name).__setitem__(slice(None), value)
    )


def settings_probe(kind: str, settings: Sequence[Setting]) -> Probe:
    """Return one probe over several settings: read together, named and put back one by one."""
    getters = tuple(setting.get for setting in settings)

    def changed(before: list[Any], now: list[Any]) -> Iterator[tuple[Setting, Any, Any]]:
        return ((s, old, new) for s, old, new in zip(settings, before, now, strict=True) if old != new)

    def describe(before: list[Any], now: list[Any]) -> Iterator[str]:
        return (f"{setting.name}: {_change(old, new)}" for setting, old, new in changed(before, now))

    def put_back(before: list[Any], now: list[Any]) -> None:
        for setting, old, _ in changed(before, now):
            if setting.set is not None:
                setting.set(old)

    return Probe(kind, lambda: [get() for get in getters], put_back, describe)


def _change(old: Any, new: Any) -> str:
    if not isinstance(old, list):
        return " -> ".join(text if len(text) <= 80 else text[:77] + "..." for text in (repr(old), repr(new)))
    added, removed = [entry for entry in new if entry not in old], [entry for entry in old if entry not in new]
    return f"added {added}, removed {removed}" if added or removed else "reordered"


def leftovers_probe(
    kind: str,
    read: Callable[[], Sequence[Any]],
    name: Callable[[Any], str],
    remove: Callable[[Any], object] | None = None,
    *,
    lost: str = "",
    collect_first: bool = False,
) -> Probe:
    """Return a probe over things of which a job may leave more than there were.

    Args:
        kind: As in `Probe`.
        read: Returns all there are now.
        name: Says what one of them is; empty for what may stay.
        remove: Ends one of them; None when only a new process is free of it.
        lost: What to say of one that is gone; empty when that is nothing to report.
        collect_first: As in `Probe`.
    """

    def describe(before: Sequence[Any], now: Sequence[Any]) -> Iterator[str]:
        yield from filter(None, (name(thing) for thing in now if thing not in before))
        yield from (lost for thing in before if lost and thing not in now)

    def put_back(before: Sequence[Any], now: Sequence[Any]) -> None:
        for thing in now:
            if remove is not None and thing not in before and name(thing):
                remove(thing)

    return Probe(kind, read, put_back if remove is not None else None, describe, collect_first)
