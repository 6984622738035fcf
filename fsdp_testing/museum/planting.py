"""How is a bug planted in a running reference? By replacing functions while a context lasts.

A replacement that does not find what it replaces is an error: an exhibit that plants nothing would be caught by nothing
and look like a hole in the harness, or worse, its check would pass for another reason.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from fsdp_testing.errors import HarnessError


class CannotPlant(HarnessError):
    """An exhibit's mutation does not fit the reference any more; bring the exhibit up to date."""


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Set `owner.name` (a function of a module or class) to `make(original)` while the context lasts."""
    original = vars(owner).get(name)
    if original is None:
        raise CannotPlant(
            f"museum: expected {getattr(owner, '__name__', owner)} to define {name}, and it does not. "
            "The reference has changed; write the mutation anew."
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
