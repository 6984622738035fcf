"""A planted fault: an implementation that is wrong in one way, and the checks each of which must catch it.

The toy with a method replaced, or a real implementation with functions replaced while a model is in use: `planting`.
"""

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
        checks: Names of the checks each of which must fail on it; at least one.
        story: What is wrong, in a few words.
        unbroken: The implementation without the fault, where it is not a toy.
        bug: "B036": number of the bug of the field that it is; "" for a fault that is ours.
        title: Of such a bug: the defect in one line.
        source: Of such a bug: public references, issues and pull requests.
        world_sizes: World sizes on which it shows; () for those of its checks.
        silent: Whether it gives wrong numbers without an error.
        fuzzed: Whether random cases can show it; False for what no operation of theirs does.
    """

    adapter: Any
    checks: tuple[str, ...]
    story: str
    unbroken: str = ""
    bug: str = ""
    title: str = ""
    source: str = ""
    world_sizes: tuple[int, ...] = ()
    silent: bool = True
    fuzzed: bool = True

    def sizes(self, check: str) -> tuple[int, ...]:
        """World sizes on which `check` judges it: two ranks, or four where groups of ranks are the matter."""
        return self.world_sizes or ((4,) if check.startswith("hybrid.") or check in _ON_FOUR_RANKS else (2,))


_ON_FOUR_RANKS = ("streams.hybrid", "options.partial_reshard", "options.flattened_axes")

FAULTS: dict[str, Fault] = {}
"""Every planted fault by its name."""


def fault(caught_by: str) -> Callable[[type[Toy]], ToyAdapter]:
    """Register a broken `Toy`; its docstring is the story, its name the import string's attribute."""

    def register(toy: type[Toy]) -> ToyAdapter:
        kind = MoreAdapter if issubclass(toy, MoreToy) else ToyAdapter
        adapter = kind(toy, toy.__name__)
        FAULTS[f"{toy.__module__}:{toy.__name__}"] = Fault(adapter, (caught_by,), (toy.__doc__ or "").strip())
        return adapter

    return register
