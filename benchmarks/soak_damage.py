"""Sound documents made hostile: cut, flipped, in other encodings, with wrong types, huge numbers and endless nesting."""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import re
import sys
from collections.abc import Iterator
from typing import Any

WORDS = (
    "", " ", "\x00", "\x1b[2J", "[/bold]", "[link=x", "{0.__class__}", "%s%n", "../../../etc/passwd", "/dev/zero", "\ud800",
    "\u202e", "nan", "inf", "-1", "99999999999999999999", "0x10", "1e400", "__import__('os').mkdir('MARK')",
    "!!python/name:os.system",
    "*" * 3000, "[" * 3000, "(a+)+$", "a" * 100_000, "NUL", "-" * 50, "fsdp_testing/case", "p" * 5000, "\n\n\n", "é" * 300,
)  # fmt: skip
NUMBERS = (0, -1, 1, 2, 3, 255, 257, 2**31, 2**63, 2**64, -(2**63), 10**18, 10**400, 1e308, 0.5, -0.0)
OTHERS = (None, True, False, [], {}, [[]], [None], {"": None}, {"__class__": "os"}, [0] * 10_000)


def nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


def hostile_value(rng: random.Random, value: Any) -> Any:
    choice = rng.randrange(6)
    if choice == 0:
        return rng.choice(WORDS)
    if choice == 1:
        return rng.choice(NUMBERS)
    if choice == 2:
        return copy.deepcopy(rng.choice(OTHERS))  # what it becomes part of is changed further
    if choice == 3:
        return nested(rng.choice((3, 40, 90, 99, 101, 500)))
    if choice == 4 and isinstance(value, list):
        return json.loads(json.dumps(value * rng.choice((0, 2, 50)))) if rng.random() < 0.7 else value[::-1]
    if choice == 4 and isinstance(value, dict):
        return [value]
    if isinstance(value, str):
        return value + rng.choice(WORDS)
    return str(value) if rng.random() < 0.5 else [value]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def changed_document(rng: random.Random, document: Any) -> Any:
    """Replace, drop, add or rename one to three things of a document; deep ones as often as those near the top."""
    document = json.loads(json.dumps(document))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        all_places = sorted(places(document), key=len)
        if not all_places:
            break
        depth = rng.choice(sorted({len(path) for path in all_places}))
        *path, key = rng.choice([path for path in all_places if len(path) == depth])
        at = document
        for step in path:
            at = at[step]
        action = rng.randrange(8)
        if action == 0:
            del at[key]
        elif action == 1 and isinstance(at, dict):
            at[rng.choice(WORDS)] = at.pop(key)
        elif action == 2 and isinstance(at, dict):
            at[rng.choice(("kind", "format", "version", "__init__", "0", "-1", *WORDS))] = hostile_value(rng, at[key])
        else:
            at[key] = hostile_value(rng, at[key])
    return document


def toml_text(rng: random.Random, text: str) -> str:
    """Replace values of a TOML text by ones that only TOML has, or by those of JSON."""
    ours = (
        "1979-05-27", "07:32:00", "1979-05-27T07:32:00Z", "inf", "-nan", "0x" + "f" * 6000, "0o7", "1_000", "'''\n'''",
        "[[[]]]", "{}", "{a={b={c=1}}}", "true", '"\\u0000"', '"\\u001b[2J"', "[" * 300 + "]" * 300, "{ = }", '"', "9" * 30,
        "9" * 5000, '""', "[]", '["a", 1, {}]', "-1", "0.5",
    )  # fmt: skip
    values = list(re.finditer(r'(?<= = )(?:"(?:[^"\\]|\\.)*"|\d+|\[[^\[\]]*\])', text))
    for match in sorted(rng.sample(values, min(len(values), rng.choice((1, 1, 2)))), key=lambda m: -m.start()):
        text = text[: match.start()] + rng.choice(ours) + text[match.end() :]
    if rng.random() < 0.3:
        keys = list(re.finditer(r"\b[a-z_]+(?= = )", text))
        match = rng.choice(keys)
        other = rng.choice(('"\\u001b"', "a.b.c", '""', "kind", "on", "'" + "k" * 3000 + "'", "reason", "format"))
        text = text[: match.start()] + other + text[match.end() :]
    return text


def changed_bytes(rng: random.Random, data: bytes) -> bytes:  # noqa: C901 - a list of damages
    choice = rng.randrange(12)
    at = rng.randrange(len(data) + 1)
    if choice == 0:
        return data[:at]
    if choice == 1:
        return data[:at] + bytes(rng.randrange(256) for _ in range(rng.choice((1, 4, 64)))) + data[at:]
    if choice == 2:
        return data[:at] + data[at + rng.choice((1, 2, 10, 100)) :]
    if choice == 3:
        copy = bytearray(data)
        for _ in range(rng.choice((1, 3, 20))):
            copy[rng.randrange(len(copy))] ^= 1 << rng.randrange(8)
        return bytes(copy)
    if choice == 4:
        return data.decode("utf-8", "replace").encode(rng.choice(("utf-16", "utf-32", "utf-8-sig", "cp037")), "replace")
    if choice == 5:
        return rng.choice(
            (b"", b" ", b"\n", b"null", b"[]", b"{}", b"0", b'""', b"nan", b"\x00" * 1000, b"\x80\x04N.", b"PK\x03\x04")
        )
    if choice == 6:
        word = rng.choice((b"[", b'{"a":', b"[{", b'"'))
        return data[:at] + word * rng.choice((10, 1000, 100_000)) + data[at:]
    if choice == 7:
        return data + data
    if choice == 8:
        return re.sub(
            rb"\d+",
            lambda m: rng.choice((m[0], b"9" * rng.choice((20, 400, 5000)), b"-1", b"1e999")),
            data,
            count=rng.choice((1, 3, 9)),
        )
    if choice == 9:
        other = rng.randrange(len(data) + 1)
        return data[:at] + data[other : other + 200] + data[at:]
    if choice == 10:
        return data.replace(b'"', b"'", rng.choice((1, -1)))
    return data.replace(b"true", b"True").replace(b":", b"=", rng.choice((1, 3)))


class Calls:
    """In a pickle: a call that leaves a mark, if anybody lets it happen."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, ("MARK",)


def pickled(rng: random.Random, document: Any) -> bytes:
    """Return a document in one of the pickle's protocols, however deep it is."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(100_000)
    try:
        return pickle.dumps(document, rng.choice((0, 2, 2, 4)))
    finally:
        sys.setrecursionlimit(limit)


def hostile(rng: random.Random, sound: str, form: str) -> bytes:
    """Return the bytes of one hostile file; `form` is "json", "toml", or "pickle" of what `sound` is the JSON of."""
    if rng.random() < 0.35:
        return changed_bytes(rng, pickled(rng, json.loads(sound)) if form == "pickle" else sound.encode())
    if form == "toml":
        return toml_text(rng, sound).encode("utf-8", "surrogatepass")
    document = changed_document(rng, json.loads(sound))
    if form == "pickle":
        return pickled(rng, [document, Calls()] if rng.random() < 0.2 else document)
    return json.dumps(document, ensure_ascii=rng.random() < 0.7).encode("utf-8", "surrogatepass")
