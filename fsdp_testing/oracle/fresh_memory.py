"""Fills memory that nobody has written to, while a case runs, with numbers that no computation takes for right.

A new process gets zeros, and memory that was freed a moment ago often still holds the right weights. Code that reads
either passes by luck. The C library can fill what it hands out and what it takes back; it is asked to in judged programs
only, since that costs time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_M_PERTURB = -6
# Freed memory is filled with this byte, new memory with its complement: about -5e303 in float64, -1.7e38 in float32.
_BYTE = 0x01


@contextmanager
def filled_with_garbage() -> Iterator[None]:
    """Have the C library fill memory that it hands out or takes back (glibc only).

    Left as they were: zeroed and very large memory, and a freed piece below 1 KiB that fits a request exactly (glibc
    returns such a piece from its cache per thread, before it fills; without that cache a training step takes 1.1 to 1.5
    times as long).
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        yield
        return
    # For the whole process, every thread of it; what is in use keeps its contents.
    set_option(_M_PERTURB, _BYTE)
    try:
        yield
    finally:
        set_option(_M_PERTURB, 0)
