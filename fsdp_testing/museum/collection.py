"""Which exhibits are there, and how does the harness judge one? By id; each id is an implementation of this module.

`fsdp_testing.museum.collection:B036` is the reference with bug B036 planted while one of its models is in use.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from contextlib import ExitStack
from functools import cache
from typing import Any

from torch import nn

from fsdp_testing.adapters import registry
from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.errors import HarnessError
from fsdp_testing.museum import halls
from fsdp_testing.museum.exhibit import Exhibit

PATHS = {"wrapper": "fsdp_ref-wrapper", "composable": "fsdp_ref-composable"}


@cache
def exhibits() -> dict[str, Exhibit]:
    """All exhibits by id, sorted.

    Raises:
        HarnessError: two exhibits with one id.
    """
    found: dict[str, Exhibit] = {}
    for module in pkgutil.iter_modules(halls.__path__):
        hall = importlib.import_module(f"{halls.__name__}.{module.name}")
        for exhibit in hall.HALL:
            if exhibit.id in found:
                raise HarnessError(f"museum: expected one exhibit {exhibit.id}, got two. Give one another id.")
            found[exhibit.id] = exhibit
    return dict(sorted(found.items()))


def implementation_of(exhibit: Exhibit) -> Adapter:
    """Return the reference with the bug: planted when a model is wrapped, taken out when its case is over."""
    sound = registry.adapter_of(PATHS[exhibit.path])
    planted = ExitStack()

    def wrap(module: nn.Module, setup: Any) -> nn.Module:
        # A case whose process was lost never reached `finish`; here the process is a new one, or clean.
        planted.close()
        planted.enter_context(exhibit.plant())
        try:
            return sound.wrap(module, setup)
        except BaseException:
            planted.close()
            raise

    def finish(model: nn.Module) -> None:
        planted.close()
        sound.finish(model)

    return dataclasses.replace(sound, name=f"fsdp_ref with {exhibit.id}", wrap=wrap, finish=finish)


@cache
def _implementation(name: str) -> Adapter:
    return implementation_of(exhibits()[name])


def __getattr__(name: str) -> Adapter:
    if name.startswith("__") or name not in exhibits():
        raise AttributeError(f"module {__name__!r} has no exhibit {name!r}")
    return _implementation(name)
