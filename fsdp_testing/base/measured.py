"""Saves the measured coverage of a rank's code to disk after each job, and before the rank ends itself.

A rank may be killed at any moment. The coverage of its earlier jobs must not be lost with it.
"""

from __future__ import annotations

import os
from typing import Any, NoReturn

_running: list[Any] = []


def start(settings: dict[str, Any] | None) -> None:
    """Begin to measure this process, if coverage is wanted: `settings` are arguments of `coverage.Coverage`."""
    if settings is None:
        return
    import coverage

    measuring = coverage.Coverage(data_suffix=True, **settings)
    measuring.start()
    _running.append(measuring)
    exit_now, pid = os._exit, os.getpid()

    def saved_before(status: int) -> NoReturn:
        if os.getpid() == pid:  # a forked child's is not the rank's
            save()
        exit_now(status)

    os._exit = saved_before


def save() -> None:
    """Save the coverage so far, and go on; a failure is reported but fails no test."""
    for measuring in _running:
        try:
            measuring.save()
        except Exception as error:  # noqa: BLE001 - of the disk, of coverage, of its database
            os.write(2, f"coverage of this rank was not saved: {type(error).__name__}: {error}\n".encode())


def stop() -> None:
    """Save the coverage, and stop measuring."""
    for measuring in _running:
        measuring.stop()
    save()
    _running.clear()
