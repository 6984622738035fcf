"""What is a broken adapter? The toy with one method replaced, and the check that must catch it by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from toy import Toy, ToyAdapter
from toy_more import MoreAdapter, MoreToy


@dataclass(frozen=True)
class Fault:
    """One planted fault.

    Attributes:
        adapter: Implementation that has it.
        caught_by: Name of the check that must fail.
        story: What is wrong, in a few words.
        unbroken: The implementation without the fault, where it is not a toy.
    """

    adapter: Any
    caught_by: str
    story: str
    unbroken: str = ""


FAULTS: dict[str, Fault] = {}
"""Every planted fault by its name."""


def fault(caught_by: str) -> Callable[[type[Toy]], ToyAdapter]:
    """Register a broken `Toy`; its docstring is the story, its name the import string's attribute."""

    def register(toy: type[Toy]) -> ToyAdapter:
        kind = MoreAdapter if issubclass(toy, MoreToy) else ToyAdapter
        adapter = kind(toy, toy.__name__)
        FAULTS[f"{toy.__module__}:{toy.__name__}"] = Fault(adapter, caught_by, (toy.__doc__ or "").strip())
        return adapter

    return register
