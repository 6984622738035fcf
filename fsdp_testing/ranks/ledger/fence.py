"""Lets a rank see what another rank wrote: once both have crossed the same fence, one reads what the other wrote before it.

Ranks find out that they disagree without a message and without a lock: each writes what it issues, then reads what its
peers wrote. That needs the write to reach memory *before* the read is done, which no processor promises: x86 keeps a write
in a buffer while later reads go ahead, ARM exchanges almost any two accesses to different places. Two ranks that come at
the same moment could both miss each other.

So both cross a fence between writing and reading: `sem_post` and `sem_trywait` on one semaphore that the whole world shares.
Both change the same word, in one step each, so all crossings have one order; `sem_post` releases, which keeps what the
rank wrote before it before it, and `sem_trywait` acquires, which keeps what the rank reads after it after it (POSIX lists
both among the functions that synchronise memory). Of two ranks A and B:

- If A's post comes before B's trywait, B reads everything that A wrote before its fence.
- Else B's trywait comes before A's post, so B's post comes before A's trywait, and A reads everything that B wrote.

No rank waits: each takes back the count that it has just posted. A rank killed in between leaves one count too many, which is
harmless. The same fence twice passes a message: write, cross, set a flag there; see the flag, cross, read here.
`tests/fsdp_testing/ranks/ledger/test_memory_orders.py` goes through all orders of execution, with and without the fence.
"""

from __future__ import annotations

import ctypes
import mmap

BYTES = 64  # a sem_t has 32 at most; a cache line of its own

_libc = ctypes.PyDLL(
    None
)  # keeps the interpreter's lock: neither function waits, and giving it up costs more than they do
_post, _try_wait = _libc.sem_post, _libc.sem_trywait
_post.restype = _try_wait.restype = None


class Fence:
    """The semaphore at byte `at` of a world's shared memory; zeroed memory is a semaphore that no rank has crossed yet."""

    def __init__(self, memory: mmap.mmap, at: int) -> None:
        # Refers to the memory, which cannot be unmapped until `close`.
        self._place = ctypes.byref((ctypes.c_char * BYTES).from_buffer(memory, at))

    def initialise(self) -> None:
        """Make the semaphore; once, before any rank exists."""
        _libc.sem_init(self._place, 1, 0)

    def cross(self) -> None:
        """Show everything written so far to ranks that cross later, and see what earlier ranks wrote before they crossed."""
        semaphore = self._place
        _post(semaphore)
        _try_wait(semaphore)

    def close(self) -> None:
        """Let go of the memory; safe to call twice. To cross afterwards is an error."""
        self.__dict__.pop("_place", None)
