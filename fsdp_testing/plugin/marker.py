"""Validates the arguments of a `world` marker, and lists every offence at once."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_testing.errors import InvalidArgument

_ISOLATIONS = ("warm", "fresh")
_ARGUMENTS = inspect.signature(lambda size=None, backend=None, timeout=None, isolation=None, *, rank=None: None)
_EXAMPLE = "Write @pytest.mark.world(2), or world([2, 4], backend='gloo', timeout=60, isolation='fresh')"


@dataclass(frozen=True, slots=True)
class Defaults:
    """The command line's defaults for markers. `fresh` makes every test fresh."""

    sizes: tuple[int, ...] = (2,)
    backend: str = "gloo"
    timeout: float | None = 60.0
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """The request of one marker. Several sizes give one test each; `listed` marks a list, even a list of one."""

    sizes: tuple[int, ...]
    listed: bool
    backend: str
    timeout: float | None
    fresh: bool
    rank: int | None

    def at(self, size: int) -> WorldRequest:
        """Return this request at one size."""
        return WorldRequest(size, self.backend, self.timeout, "fresh" if self.fresh else "warm", self.rank)


@dataclass(frozen=True, slots=True)
class WorldRequest:
    """The world of one test."""

    size: int
    backend: str
    timeout: float | None
    isolation: str
    rank: int | None


def read_marker(
    args: Sequence[Any], kwargs: Mapping[str, Any], *, where: str, defaults: Defaults, backends: Sequence[str]
) -> Request:
    """Validate the arguments of one marker.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.
        where: The carrier of the marker, for the message.
        defaults: Defaults for arguments that are left out.
        backends: Known backend names.

    Raises:
        InvalidArgument: Lists every offence.
    """
    try:
        given = _ARGUMENTS.bind(*args, **kwargs).arguments
    except TypeError as error:
        shown = ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())])
        raise InvalidArgument(
            f"{where}: expected world(size, backend, timeout, isolation, rank=None), got world({shown}) ({error}). "
            f"{_EXAMPLE}."
        ) from None
    problems: list[str] = []
    sizes, listed = _sizes(given.get("size", defaults.sizes), problems)
    if "size" not in given:
        listed = len(sizes) > 1
    backend = _member("expected backend to be", given.get("backend", defaults.backend), backends, problems)
    timeout = _timeout(given["timeout"], problems) if "timeout" in given else defaults.timeout
    isolation = _member("expected isolation to be", given.get("isolation", "warm"), _ISOLATIONS, problems)
    rank = _rank(given.get("rank"), sizes, backend, problems)
    if problems:
        raise InvalidArgument(f"{where}: {'; '.join(problems)}. {_EXAMPLE}.")
    return Request(sizes, listed, backend, timeout, defaults.fresh or isolation == "fresh", rank)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _sizes(value: Any, problems: list[str]) -> tuple[tuple[int, ...], bool]:
    listed = isinstance(value, list | tuple)
    sizes = tuple(value) if listed else (value,)
    bad = [size for size in sizes if not _is_size(size)]
    if bad or not sizes:
        got = ", ".join(repr(size) for size in bad) or "an empty list"
        problems.append(f"expected size to be a whole number of ranks >= 1, or a list of them, got {got}")
    elif len(set(sizes)) < len(sizes):
        problems.append(f"expected different sizes, got {list(sizes)}")
    return sizes, listed


def _member(expected: str, value: Any, allowed: Sequence[str], problems: list[str]) -> str:
    if isinstance(value, str) and value in allowed:
        return value
    problems.append(f"{expected} one of {', '.join(allowed)}, got {value!r}")
    return ""


def _timeout(value: Any, problems: list[str]) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0 or math.isinf(value):
        problems.append(f"expected timeout to be seconds > 0, or None for no deadline, got {value!r}")
        return None
    return float(value)


def _rank(value: Any, sizes: tuple[int, ...], backend: str, problems: list[str]) -> int | None:
    if value is None:
        return 0 if backend == "fake" else None
    if backend and backend != "fake":
        problems.append(f"expected rank only with backend 'fake', got rank={value!r} with backend {backend!r}")
    elif not isinstance(value, int) or isinstance(value, bool) or value < 0:
        problems.append(f"expected rank to be a whole number >= 0, got {value!r}")
    elif any(_is_size(size) and value >= size for size in sizes):
        problems.append(f"expected rank below every size, got rank={value} with size {list(sizes)}")
    return value if isinstance(value, int) else None


def read_defaults(
    world_size: str | None, backend: str | None, timeout: str | None, isolation: str | None, backends: Sequence[str]
) -> Defaults:
    """Validate the command line's `--world-size`, `--dist-backend`, `--rank-timeout`, `--isolation`.

    Raises:
        InvalidArgument: Lists every offence.
    """
    problems: list[str] = []
    sizes, seconds = Defaults().sizes, Defaults().timeout
    if world_size is not None:
        parts = world_size.split(",")
        if all(part.strip().isdecimal() and int(part) >= 1 for part in parts):
            sizes = tuple(dict.fromkeys(int(part) for part in parts))
        else:
            problems.append(f"--world-size: expected ranks >= 1 such as 2 or 2,4, got {world_size!r}")
    if timeout is not None:
        try:
            seconds = float(timeout)
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds < math.inf:
            problems.append(f"--rank-timeout: expected seconds >= 0, got {timeout!r}")
    if backend is not None:
        _member("--dist-backend: expected", backend, backends, problems)
    if isolation is not None:
        _member("--isolation: expected", isolation, _ISOLATIONS, problems)
    if problems:
        raise InvalidArgument("command line: " + "; ".join(problems) + ". Correct the options.")
    return Defaults(sizes, backend or "gloo", seconds or None, isolation == "fresh")
