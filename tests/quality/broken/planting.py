"""Plants a bug in a running reference, by replacing functions while a context lasts.

A replacement that does not find what it replaces is an error: a fault that plants nothing would be caught by nothing
and look like a hole in the harness, or worse, its check would pass for another reason.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from fault import FAULTS, Fault
from torch import nn

from fsdp_testing.adapters import registry
from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.errors import HarnessError

PATHS = {"wrapper": "fsdp_ref-wrapper", "composable": "fsdp_ref-composable"}
"""The reference's two ways in."""


class CannotPlant(HarnessError):
    """A mutation does not fit the implementation any more; bring it up to date."""


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Set `owner.name` (a function of a module or class) to `make(original)` while the context lasts."""
    original = vars(owner).get(name)
    if original is None:
        raise CannotPlant(
            f"planted fault: expected {getattr(owner, '__name__', owner)} to define {name}, and it does not. "
            "The implementation has changed; write the mutation anew."
        )
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


Change = tuple[Any, str, Callable[[Any], Any]]
"""A module or class, the name of a function of it, and what makes another one of that function."""


def planting(*changes: Change) -> Callable[[], Any]:
    """Return a plant that makes all `changes` (owner, name, make) together."""

    @contextmanager
    def plant() -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name, make in changes:
                stack.enter_context(replaced(owner, name, make))
            yield

    return plant


def instead(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """Replace by `function`, which gets the original as its first argument."""

    def make(original: Any) -> Any:
        plain = original.__func__ if isinstance(original, (staticmethod, classmethod)) else original

        @functools.wraps(plain)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(plain, *args, **kwargs)

        if isinstance(original, staticmethod):
            return staticmethod(call)
        return classmethod(call) if isinstance(original, classmethod) else call

    return make


def with_fault(unbroken: str, plant: Callable[[], Any], name: str, reference: str = "") -> Adapter:
    """Return an implementation with a fault: planted when a model is wrapped, taken out when its case is over."""
    sound, fault = registry.adapter_of(unbroken), ExitStack()

    def wrap(module: nn.Module, setup: Any) -> nn.Module:
        # A case whose process was lost never reached `finish`; here the process is a new one, or clean.
        fault.close()
        fault.enter_context(plant())
        try:
            return sound.wrap(module, setup)
        except BaseException:
            fault.close()
            raise

    def finish(model: nn.Module) -> None:
        fault.close()
        sound.finish(model)

    return dataclasses.replace(sound, name=name, reference=reference, wrap=wrap, finish=finish)


def planted(
    unbroken: str, owner: Any, name: str, checks: str, *, also: Sequence[Change] = (), bug: str = "", **facts: Any
) -> Callable[[Callable[..., Any]], Adapter]:
    """Register the decorated function as a fault of `unbroken`; it gets the original as its first argument.

    Its docstring is the story; of a bug of the field the first line is the title.

    Args:
        unbroken: The implementation in which it is planted while one of its models is in use.
        owner: Module or class in which a function is replaced.
        name: Name of that function.
        checks: Names of the checks that must fail on it, separated by blanks.
        also: What else is replaced at the same time.
        bug: Number of the bug of the field that it is.
        **facts: Other fields of `Fault`.
    """

    def register(mutation: Callable[..., Any]) -> Adapter:
        title, _, rest = (inspect.getdoc(mutation) or "").partition("\n\n")
        title, story = (title[:1].lower() + title[1:].rstrip("."), rest) if bug else ("", title)
        target = f"{mutation.__module__}:{mutation.__name__}"
        plant = planting((owner, name, instead(mutation)), *also)
        adapter = with_fault(unbroken, plant, f"fsdp_ref with {bug}" if bug else mutation.__name__, target)
        story = " ".join(story.split())
        FAULTS[target] = Fault(adapter, tuple(checks.split()), story, unbroken, bug, title, **facts)
        return adapter

    return register


def known_bug(
    number: str, owner: Any, name: str, source: str, checks: str, *, path: str = "wrapper", **facts: Any
) -> Callable[[Callable[..., Any]], Adapter]:
    """Register the decorated function as a bug of the field, planted in the reference: see `planted`."""
    return planted(PATHS[path], owner, name, checks, bug=number, source=source, **facts)
