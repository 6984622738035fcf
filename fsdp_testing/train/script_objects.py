"""Batches that hold objects of classes that a script defines, on their way to processes that do not have these classes."""

from __future__ import annotations

import copy
import io
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from fsdp_testing.errors import InvalidArgument
from fsdp_testing.oracle.models import map_tensors


@dataclass(frozen=True, slots=True)
class ScriptObject:
    """An object that only a process that runs the script can make: where its class is defined, and its attributes.

    Attributes:
        module: Module of the class, or of a function.
        name: Qualified name in it.
        parts: Attributes by name; None of what is not taken apart: functions, modules, members of an enumeration.
        is_named: Whether the name is that of the object itself, as of a function; else that of its class.
    """

    module: str
    name: str
    parts: dict[str, Any] | None = None
    is_named: bool = False


def packed(tree: Any, function: Callable[[torch.Tensor], torch.Tensor], around: tuple[int, ...] = ()) -> Any:
    """Return nested containers with `function` of each tensor, and `ScriptObject` in place of what cannot be sent.

    `around` are the identities of what holds it: an object may name the one that holds it.
    """
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if type(tree) in _PLAIN:
        return tree
    of_script = _is_of_script(tree)
    if of_script and isinstance(tree, Enum):
        return ScriptObject(type(tree).__module__, f"{type(tree).__qualname__}.{tree.name}", is_named=True)
    if isinstance(tree, _MACHINERY) or (of_script and callable(tree)) or id(tree) in around:
        return _left_whole(tree)
    parts, around = attributes(tree), (*around, id(tree))
    if of_script and parts is not None:
        sent = {name: packed(part, function, around) for name, part in parts.items()}
        return ScriptObject(type(tree).__module__, type(tree).__qualname__, sent)
    if isinstance(tree, Mapping) and not is_dataclass(tree):
        items = {key: packed(part, function, around) for key, part in tree.items()}
        return OrderedDict(items) if isinstance(tree, OrderedDict) else items
    if isinstance(tree, (list, tuple)) and (of_script or type(tree) in (list, tuple)):
        return (list if isinstance(tree, list) else tuple)(packed(part, function, around) for part in tree)
    made = map_tensors(function, tree)
    whole = made if parts is None else [part for part in parts.values() if not isinstance(part, torch.Tensor)]
    return made if _can_be_sent(whole) else _left_whole(tree)


_PLAIN = frozenset({bool, int, float, str, bytes, type(None), torch.dtype, torch.device})
"""Types of which a batch may have many values; not those derived from them, as an enumeration of numbers is."""


_MACHINERY = (nn.Module, torch.optim.Optimizer, Dataset, DataLoader)
"""What comes along with a batch and is no data, and is large; an object that holds one of these is no data either."""


class _OutsideTheScript(pickle.Pickler):
    """Pickles as it is done after the script, whose classes and functions are not found then."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (type, FunctionType)) and _is_of_script(value):
            raise pickle.PicklingError(value.__qualname__)
        return NotImplemented


def _can_be_sent(value: Any) -> bool:
    try:
        _OutsideTheScript(io.BytesIO()).dump(value)
    except Exception:  # noqa: BLE001 - a user's own reduction may raise anything
        return False
    return True


def _left_whole(tree: Any) -> ScriptObject:
    made = _class_of(tree)
    return ScriptObject(made.__module__, made.__qualname__, is_named=made is tree)


def unpacked(tree: Any, own: Any = None) -> Any:
    """Return nested containers with the objects of the script again; `own`: what the script has made at this place itself.

    Raises:
        InvalidArgument: A class or function is not found, and the script has made nothing of it at this place.
    """
    if isinstance(tree, ScriptObject):
        return _made(tree, own)
    if type(tree) in (dict, OrderedDict):
        return type(tree)((key, unpacked(part, _at(own, key))) for key, part in tree.items())
    if type(tree) in (list, tuple):
        return type(tree)(unpacked(part, _at(own, place)) for place, part in enumerate(tree))
    return tree


def attributes(tree: Any) -> dict[str, Any] | None:
    """Return the attributes of a dataclass, a named tuple, a `ScriptObject` or an object of a script's class; else None."""
    if type(tree) in _PLAIN:
        return None
    if isinstance(tree, ScriptObject):
        return tree.parts
    if is_dataclass(tree) and not isinstance(tree, type):
        return {item.name: getattr(tree, item.name) for item in fields(tree)}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return dict(zip(tree._fields, tree))
    if not _is_plain_object(tree):
        return None
    slots = (name for kind in type(tree).__mro__ for name in getattr(kind, "__slots__", ()) if hasattr(tree, name))
    parts = {name: getattr(tree, name) for name in slots} | getattr(tree, "__dict__", {})
    return None if any(isinstance(part, _MACHINERY) for part in parts.values()) else parts


def _is_plain_object(tree: Any) -> bool:
    other = isinstance(tree, (type, Enum, *_MACHINERY, Mapping, list, tuple)) or callable(tree) or is_dataclass(tree)
    return not other and _is_of_script(tree)


def with_attributes(tree: Any, parts: Mapping[str, Any]) -> Any:
    """Return a copy of such an object with other attributes."""
    if isinstance(tree, ScriptObject):
        return replace(tree, parts={**parts})
    if isinstance(tree, tuple):
        return type(tree)(*parts.values())
    made = copy.copy(tree)
    for name, part in parts.items():
        object.__setattr__(made, name, part)
    return made


def _class_of(tree: Any) -> Any:
    return tree if callable(tree) and hasattr(tree, "__qualname__") else type(tree)


def _is_of_script(tree: Any) -> bool:
    """Whether an object is of a class, or is a function, that other processes cannot import."""
    made = _class_of(tree)
    module, name = str(getattr(made, "__module__", "")), str(getattr(made, "__qualname__", ""))
    return module == "__main__" or "<" in name


def _at(own: Any, key: Any) -> Any:
    try:
        return own[key]
    except (TypeError, LookupError):
        return None


def _made(tree: ScriptObject, own: Any) -> Any:
    kind: Any = sys.modules.get(tree.module)
    for name in tree.name.split("."):
        kind = getattr(kind, name, None)
    alike = own is not None and _class_of(own).__qualname__ == tree.name
    if not alike and (kind is None or (tree.parts is None and not tree.is_named)):
        raise InvalidArgument(
            f"data: expected batches of plain data and tensors, got {tree.name} of {tree.module}, which one process cannot make "
            "for the rows of all ranks. Define it at the top level of the script, or give tensors instead."
        )
    if tree.parts is None:
        return own if alike else kind
    before = attributes(own) if alike else None
    parts = {name: unpacked(part, (before or {}).get(name)) for name, part in tree.parts.items()}
    if issubclass(kind or type(own), tuple):
        return (kind or type(own))(*parts.values())
    empty = copy.copy(own) if alike else object.__new__(kind)
    for name, part in parts.items():
        object.__setattr__(empty, name, part)
    return empty
