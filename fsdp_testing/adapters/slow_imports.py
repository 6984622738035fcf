"""Says that a foreign module's import takes long and where it stands, and ends an import that seems to hang."""

from __future__ import annotations

import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from fsdp_testing.base.compat import frame_of
from fsdp_testing.errors import InvalidImplementation

NOTICE_AFTER = 15.0
"""Seconds until the first line on a slow import; another one follows each time that as many have passed."""
LIMIT = 600.0
"""Seconds after which an import counts as hung: modules that compile kernels while they are imported take minutes."""


@contextmanager
def importing(target: str, where: str) -> Iterator[None]:
    """Watch an import in this thread from another one, which writes to stderr.

    Raises:
        InvalidImplementation: The import took longer than `LIMIT`. Only in the main thread, with Python's own handler of
            SIGINT: no other thread can be interrupted.
    """
    thread, over = threading.current_thread(), threading.Event()
    stoppable = thread is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    stopped_at: list[str] = []

    def watch() -> None:
        seconds = 0.0
        while not over.wait(NOTICE_AFTER):
            seconds += NOTICE_AFTER
            place = _place(thread)
            if seconds >= LIMIT and stoppable:
                stopped_at.append(place)
                signal.pthread_kill(thread.ident or 0, signal.SIGINT)  # reaches a call that sleeps, too
                return
            sys.stderr.write(f"{where}: importing {target} takes {seconds:.0f} s so far, at {place}\n")

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    except KeyboardInterrupt:
        if not stopped_at:
            raise
        raise InvalidImplementation(
            f"{where}: expected {target} to be imported in {LIMIT:g} s, got an import that stands at {stopped_at[0]}. "
            "Correct the module: it must not wait for anything while it is imported."
        ) from None
    finally:
        over.set()
        watcher.join()


def _place(thread: threading.Thread) -> str:
    """Return file and line that a thread runs; those of the interpreter's import are left out."""
    lines = [line for line in traceback.extract_stack(frame_of(thread)) if not line.filename.startswith("<frozen ")]
    return f"{lines[-1].filename}:{lines[-1].lineno}" if lines else "an unknown place"
