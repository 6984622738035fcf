"""Which way did a case take through the implementation's source, where that is Python?

Recorded for a small fraction of cases on one rank, since it slows a case down several times. An arc is a pair of lines
executed one after the other in one function, kept as a number that is equal on every run.
"""

from __future__ import annotations

import sys
import zlib
from types import FrameType
from typing import Any


class Tracer:
    """Records arcs of the files whose name contains one of `sources`, while the context lasts.

    Uses `sys.settrace` and puts back what was set before (a debugger, coverage): those lines are theirs meanwhile lost.
    """

    def __init__(self, sources: tuple[str, ...]) -> None:
        self._sources = sources
        self._wanted: dict[str, str | None] = {}
        self._arcs: set[tuple[str, int, int]] = set()
        self._before: Any = None

    def __enter__(self) -> Tracer:
        self._before = sys.gettrace()
        sys.settrace(self._on_call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def taken(self) -> frozenset[int]:
        """Returns the arcs as numbers."""
        return frozenset(zlib.crc32(f"{file}:{a}>{b}".encode()) for file, a, b in self._arcs)

    def _on_call(self, frame: FrameType, event: str, _argument: Any) -> Any:
        file = frame.f_code.co_filename
        if file not in self._wanted:
            found = next((part for part in self._sources if part in file), None)
            self._wanted[file] = None if found is None else file[file.index(found) :]
        short = self._wanted[file]
        if short is None:
            return None
        last = frame.f_lineno

        def on_line(inner: FrameType, kind: str, _: Any) -> Any:
            nonlocal last
            if kind == "line":
                self._arcs.add((short, last, inner.f_lineno))
                last = inner.f_lineno
            return on_line

        return on_line
