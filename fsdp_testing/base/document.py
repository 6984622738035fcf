"""Records as JSON documents and back, with every damage named.

One codec for all records: frozen dataclasses whose fields are scalars, enums, tuples, string-keyed mappings, other
records, or tagged unions (records that share a base with a `kind` class attribute). Decoding checks every field against
its annotation and names the path of the first offender; it never executes anything found in a document. A document says
in its header what it is (`Format`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import json
import math
import re
import tomllib
import types
import typing
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from fsdp_testing.errors import InvalidRecord

R = TypeVar("R")

_TAGGED: dict[type[Any], Callable[[str], type[Any] | None]] = {}
_AS_THEY_ARE = frozenset({str, int, bool, type(None)})
_NON_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
# Our documents are a tenth as deep, and code that walks through one may need several frames for each level.
_DEEPEST = 100
_STRINGS_AND_SCALARS = re.compile(r'"(?:[^"\\]|\\.)*"?|[^][{}"]+', re.DOTALL)


def register_union(base: type[Any], find: Callable[[str], type[Any] | None]) -> None:
    """Let fields annotated with `base` hold any of its registered kinds.

    Args:
        base: The common base; its instances carry a class attribute `kind`, written into the document.
        find: Returns the class of a kind, or None if no such kind exists.
    """
    _TAGGED[base] = find


def encode(value: Any) -> Any:
    """Return `value` as plain JSON data: records become objects, tuples become arrays, non-finite floats strings."""
    if type(value) in _AS_THEY_ARE:
        return value
    names = _fields_of(type(value))  # type: ignore[arg-type]  # classes are hashable, but mypy doubts it of type[Any]
    if names is not None:
        later = _added_later(type(value))  # type: ignore[arg-type]  # as above
        data = {n: encode(getattr(value, n)) for n in names if n not in later or getattr(value, n) != later[n]}
        kind = getattr(type(value), "kind", None)
        return {"kind": kind, **data} if isinstance(kind, str) else data
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, (tuple, list, frozenset, set)):
        items = sorted(value) if isinstance(value, (frozenset, set)) else value
        return [encode(item) for item in items]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise InvalidRecord(
        f"record: expected JSON data, got a {type(value).__name__}. "
        "Keep tensors and other live objects out of records that are written to files."
    )


@functools.lru_cache(maxsize=512)
def _fields_of(kind: Hashable) -> tuple[str, ...] | None:
    """Names of the fields of a record's class; None for any other class."""
    if not dataclasses.is_dataclass(kind):
        return None
    return tuple(field.name for field in dataclasses.fields(kind))


@functools.lru_cache(maxsize=512)
def _added_later(kind: Hashable) -> dict[str, Any]:
    """Defaults of the fields that are `ADDED_LATER`, by name."""
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    return {field.name: field.default for field in fields if "added_later" in field.metadata}


ADDED_LATER = {"added_later": True}
"""Metadata of a field that is newer than documents of its record: its default is not written, so that an old value keeps its
text and its identity."""


def decode(cls: type[R], data: Any, where: str | None = None) -> R:
    """Build a `cls` from plain JSON data.

    Raises:
        InvalidRecord: A field is missing, unknown, or of the wrong type; the message names its path.
    """
    return cast("R", _decode(cls, data, where or cls.__name__))


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Return `value` as JSON text; the same value always gives the same text."""
    return json.dumps(encode(value), indent=indent, allow_nan=False)


def read_text(path: Path, expected: str, advice: str) -> str:
    """Return the text of a file.

    Args:
        path: Path of the file.
        expected: What the file should be, for the message.
        advice: A sentence that says what to do if it is not.

    Raises:
        InvalidRecord: The file cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = f"a file that is not UTF-8 ({error})" if isinstance(error, UnicodeDecodeError) else str(error)
        raise InvalidRecord(f"{path}: expected {expected}, got {what}. {advice}") from error


def _depth(text: str) -> int:
    """Return the deepest nesting of brackets."""
    depth = deepest = 0
    for bracket in _STRINGS_AND_SCALARS.sub("", text):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    return deepest


def load_json(text: str, where: str) -> dict[str, Any]:
    """Parse the JSON object in `text`.

    Raises:
        InvalidRecord: The text is not JSON, not an object, or nested deeper than any document of ours.
    """
    if (depth := _depth(text)) > _DEEPEST:
        raise InvalidRecord(
            f"{where}: expected a JSON document of at most {_DEEPEST} levels, got one of {depth}. Is this the right file?"
        )
    try:
        data = json.loads(text)
    except ValueError as error:
        raise InvalidRecord(f"{where}: expected a JSON document, got {error}. Is the file complete?") from error
    if not isinstance(data, dict):
        raise InvalidRecord(f"{where}: expected a JSON object, got {_shown(data)}. Is this the right file?")
    return data


def load_toml(text: str, where: str) -> dict[str, Any]:
    """Parse a TOML text.

    Raises:
        InvalidRecord: It is not TOML, nested deeper than any document of ours, or has an integer beyond the 64 bits of TOML.
    """
    try:
        document = tomllib.loads(text)
        if beyond := next((number for number in _integers(document) if number.bit_length() > 64), None):
            raise ValueError(f"an integer of {beyond.bit_length()} bits")
    except (ValueError, RecursionError) as error:
        raise InvalidRecord(f"{where}: expected a TOML file, got {error}. Fix it.") from error
    return document


def _integers(data: Any) -> Iterator[int]:
    if isinstance(data, int):
        yield data
    elif isinstance(data, (dict, list)):
        for item in data.values() if isinstance(data, dict) else data:
            yield from _integers(item)


class Format(NamedTuple):
    """A kind of document: its name in the header, and the newest version that can be read."""

    name: str
    version: int

    def write(self, body: Any, *, indent: int | None = None) -> str:
        """Return a record, or plain data, as a document."""
        return to_json({"format": self.name, "version": self.version, **encode(body)}, indent=indent)

    def read(self, document: str | Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return a document without its header.

        Args:
            document: Its text, or what it was parsed to.
            where: The document's origin, for messages.

        Raises:
            InvalidRecord: No JSON object, another kind of document, or one written by a newer version.
        """
        data = load_json(document, where) if isinstance(document, str) else document
        if not isinstance(data, Mapping):
            raise _wrong(where, "an object", data)
        if data.get("format") != self.name:
            got = f"got {_shown(data.get('format'))}. Is this the right file?"
            raise InvalidRecord(f"{where}: expected format {self.name!r}, {got}")
        found = data.get("version")
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            got = f"got {_shown(found)}. The file is damaged."
            raise InvalidRecord(f"{where}.version: expected a positive integer, {got}")
        if found > self.version:
            got = f"got {found}. It was written by a newer fsdp-testing; update."
            raise InvalidRecord(f"{where}.version: expected at most {self.version}, {got}")
        return {key: item for key, item in data.items() if key not in ("format", "version")}


def _decode(hint: Any, data: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    if hint is Any:
        return data
    if origin in (typing.Union, types.UnionType):
        return _decode_union(hint, data, where)
    if origin is tuple:
        return _decode_tuple(typing.get_args(hint), data, where)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(data, dict):
            raise _wrong(where, "an object", data)
        inner = typing.get_args(hint)[1]
        return {key: _decode(inner, item, f"{where}.{key}") for key, item in data.items()}
    if isinstance(hint, type):
        return _decode_type(hint, data, where)
    raise InvalidRecord(f"{where}: expected a field that a document can hold, got annotation {hint!r}.")


def _decode_type(hint: type[Any], data: Any, where: str) -> Any:
    if issubclass(hint, enum.Enum):
        try:
            return hint(data)
        except ValueError:
            known = ", ".join(repr(member.value) for member in hint)
            raise _wrong(where, f"one of {known}", data) from None
    if hint in _TAGGED:
        return _decode_tagged(hint, data, where)
    if dataclasses.is_dataclass(hint):
        return _decode_record(hint, data, where)
    if issubclass(hint, tuple) and hasattr(hint, "_fields"):
        return hint(*_decode_tuple(tuple(_hints(cast("Hashable", hint)).values()), data, where))
    return _decode_scalar(hint, data, where)


def _decode_scalar(hint: type[Any], data: Any, where: str) -> Any:
    if hint is float:
        if isinstance(data, str) and data in _NON_FINITE:
            return _NON_FINITE[data]
        if isinstance(data, (int, float)) and not isinstance(data, bool):
            with contextlib.suppress(OverflowError):
                return float(data)
        raise _wrong(where, "a number", data)
    if hint in (int, bool, str) and type(data) is hint:
        return data
    if hint is type(None) and data is None:
        return None
    raise _wrong(where, _hint_name(hint), data)


def _decode_tagged(base: type[Any], data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise _wrong(where, f"an object with a kind of {base.__name__.lower()}", data)
    kind = data.get("kind")
    cls = _TAGGED[base](kind) if isinstance(kind, str) else None
    if cls is None:
        raise _wrong(f"{where}.kind", f"a known kind of {base.__name__.lower()}", kind)
    return _decode_record(cls, {key: item for key, item in data.items() if key != "kind"}, where)


def _decode_record(cls: type[Any], data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise _wrong(where, f"an object ({cls.__name__})", data)
    hints = _hints(cast("Hashable", cls))
    fields = {field.name: field for field in dataclasses.fields(cls)}
    unknown = sorted(set(data) - set(fields))
    required = {
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    missing = sorted(required - set(data))
    if unknown or missing:
        raise InvalidRecord(
            f"{where}: expected the fields {', '.join(fields)}, got unknown {unknown} and missing {missing}. "
            "The document is damaged or was written for another record."
        )
    values = {name: _decode(hints[name], item, f"{where}.{name}") for name, item in data.items()}
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:
        if isinstance(error, InvalidRecord):
            raise
        raise InvalidRecord(f"{where}: expected a legal {cls.__name__}, got {error}. Fix the document.") from error


def _decode_union(hint: Any, data: Any, where: str) -> Any:
    args = typing.get_args(hint)
    if data is None and type(None) in args:
        return None
    options = [arg for arg in args if arg is not type(None)]
    if len(options) == 1:
        return _decode(options[0], data, where)
    for option in options:
        try:
            return _decode(option, data, where)
        except InvalidRecord:
            continue
    raise _wrong(where, " or ".join(_hint_name(option) for option in options), data)


def _decode_tuple(args: tuple[Any, ...], data: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(data, list):
        raise _wrong(where, "an array", data)
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_decode(args[0], item, f"{where}[{index}]") for index, item in enumerate(data))
    if len(args) != len(data):
        raise _wrong(where, f"an array of {len(args)}", data)
    return tuple(_decode(arg, item, f"{where}[{index}]") for index, (arg, item) in enumerate(zip(args, data)))


@functools.cache
def _hints(cls: Hashable) -> dict[str, Any]:
    return typing.get_type_hints(cast("type[Any]", cls))


def _hint_name(hint: Any) -> str:
    return str(getattr(hint, "__name__", hint))


def _shown(data: Any) -> str:
    text = repr(data)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _wrong(where: str, expected: str, data: Any) -> InvalidRecord:
    return InvalidRecord(f"{where}: expected {expected}, got {_shown(data)}. Fix or regenerate the document.")
