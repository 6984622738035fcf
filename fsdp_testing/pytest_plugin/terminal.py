"""Where is the person? Find the terminal of this process for `--rank-pdb`, also while pytest captures."""

from __future__ import annotations

from pathlib import Path

import pytest


def debugged_rank(config: pytest.Config) -> tuple[int, str] | None:
    """Return the rank of `--rank-pdb` and the name of the terminal it gets; None without the option.

    Raises:
        pytest.UsageError: The rank is no number, or there is no terminal to give.
    """
    text = config.option.rank_pdb
    if text is None:
        return None
    if not text.isdecimal():
        raise pytest.UsageError(f"--rank-pdb: expected a rank such as 0, got {text!r}. Give the rank to debug.")
    terminal = terminal_name()
    if getattr(config.option, "numprocesses", None) or terminal is None:
        raise pytest.UsageError(
            "--rank-pdb: expected a terminal for the debugged rank, got none. Run pytest in a terminal, without -n."
        )
    return int(text), terminal


def terminal_name() -> str | None:
    """Return the device of this process's terminal; pytest keeps it open under another number while it captures."""
    for entry in sorted(Path("/proc/self/fd").iterdir(), key=lambda path: int(path.name)):
        try:
            target = str(entry.readlink())
        except OSError:
            continue  # the number under which the folder itself was read
        if target.startswith(("/dev/pts/", "/dev/tty")) and target != "/dev/tty":
            return target
    return None
