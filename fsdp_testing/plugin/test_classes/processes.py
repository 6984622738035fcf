"""Runs N processes of a test class on the pool, and judges all of them.

A test class of MultiProcess style expects new processes for each test. Their fork server has imported the same modules of
torch as the controlling process, including torch's test classes. Tests marked `world` use a different fork server, because
the import of torch's test classes changes settings of torch for good.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fsdp_testing.errors import PoolBroken, WorldFailed
from fsdp_testing.ranks.pool import Fate, Pool, PooledWorld, RankOutcome, WorldOutcome
from fsdp_testing.ranks.pool.outcome import left_behind, rank_names

__tracebackhide__ = True  # pytest shows the caller's frames and the ranks' errors, not these frames

_IMPORTED_AHEAD = ("torch", "numpy", "expecttest")
# They start processes, threads or a web server when they are imported.
_NEVER = ("torch._inductor.compile_worker", "torch.utils.tensorboard")


class LeftBehindWarning(UserWarning):
    """A test leaked state in one of its processes."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How one process ended: its exit code, and why it skipped, if it did."""

    code: int = 0
    why: str = ""


@dataclass(slots=True)
class Settings:
    """The command line's options for tests on ranks.

    Attributes:
        timeout: Seconds until a process counts as hung, if fewer than the class allows.
        strict: Whether a test that leaks state fails.
    """

    timeout: float | None = None
    strict: bool = False


settings = Settings()


class _OwnPool:
    """The pool of test classes, made when first needed."""

    def __init__(self) -> None:
        self.pool: Pool | None = None
        self.coverage: dict[str, Any] | None = None

    def get(self) -> Pool:
        if self.pool is None:
            self.pool = Pool(_imported_here())
            self.pool.coverage = self.coverage
            atexit.register(self.close)
        return self.pool

    def world(self, size: int) -> PooledWorld:
        try:
            return self.get().world(size, "bare", "fresh")
        except PoolBroken:
            # The import ahead started threads, or failed; then ranks import the modules themselves.
            self.close()
            self.pool = Pool()
            self.pool.coverage = self.coverage
            return self.pool.world(size, "bare", "fresh")

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()
            self.pool = None


own_pool = _OwnPool()


def _imported_here() -> list[str]:
    """Return the modules of torch that this process has imported, in the order in which the imports began."""
    found = (name for name in list(sys.modules) if name.partition(".")[0] in _IMPORTED_AHEAD)
    return [name for name in found if not name.startswith(_NEVER)]


class Processes:
    """N processes without a group; each reads its place from a launcher's variables."""

    def __init__(self, size: int) -> None:
        self._world = own_pool.world(size)
        self.seconds = 0.0

    def run(
        self,
        target: str,
        *args: Any,
        name: str,
        timeout: float | None,
        accepted: Callable[[int], bool] | None = None,
        lasting: frozenset[str] | None = None,
    ) -> list[Ended]:
        """Call `target(*args)` in each process and judge all of them.

        Args:
            target: "package.module:function", which returns an `Ended`.
            args: Sent to each process.
            name: The test, for messages.
            timeout: Seconds until a process counts as hung; None: no limit.
            accepted: Codes besides 0 with which a process may end, by `os._exit` too; None: any code that all processes share.
            lasting: As in `PooledWorld.execute`; None: nothing is compared.

        Returns:
            How each process ended, by rank.

        Raises:
            WorldFailed: A process raised, died or hung, or they ended differently.
        """
        __tracebackhide__ = True
        limits = [limit for limit in (timeout, settings.timeout) if limit is not None]
        started = time.monotonic()
        outcome = self._world.execute(target, args, timeout=min(limits, default=None), name=name, lasting=lasting)
        self.seconds = time.monotonic() - started
        ended = [_ended(rank, accepted) for rank in outcome.ranks]
        known = [each for each in ended if each is not None]
        disagree = outcome.diagnosis is not None or len({each.code for each in known}) > 1
        if len(known) < len(ended) or (accepted is None and disagree):
            raise WorldFailed(_exit_codes(outcome) + outcome.describe(), outcome)
        _show_output(outcome)
        _report_leaks(name, outcome)
        return known

    def close(self) -> None:
        """End the processes."""
        self._world.release()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _ended(rank: RankOutcome, accepted: Callable[[int], bool] | None) -> Ended | None:
    """Return how a process ended; None if it ended badly."""
    if isinstance(rank.value, Ended):
        return rank.value if accepted is None or not rank.value.code or accepted(rank.value.code) else None
    if rank.fate is Fate.DIED and accepted is not None:
        code = rank.exit_code if rank.signal_name is None else -_signal_number(rank.signal_name)
        return Ended(code) if code is not None and accepted(code) else None
    return None


def _signal_number(name: str) -> int:
    import signal

    with contextlib.suppress(KeyError):
        return int(signal.Signals[name])
    return 0


def _exit_codes(outcome: WorldOutcome) -> str:
    """Return a line that says which processes ended with which exit code; empty if none has one."""
    by_code: dict[int, list[int]] = {}
    for rank in outcome.ranks:
        if isinstance(rank.value, Ended):
            by_code.setdefault(rank.value.code, []).append(rank.rank)
    how = "; ".join(f"{rank_names(ranks)} ended with exit code {code}" for code, ranks in by_code.items())
    return f"{how}. Expected all processes to pass, or to skip, alike.\n" if any(by_code) else ""


def _show_output(outcome: WorldOutcome) -> None:
    for rank in outcome.ranks:
        for text, stream in ((rank.stdout, sys.stdout), (rank.stderr, sys.stderr)):
            stream.writelines(f"[rank {rank.rank}] {line}\n" for line in text.splitlines())


def _report_leaks(name: str, outcome: WorldOutcome) -> None:
    lines = left_behind((rank.rank, rank.dirt) for rank in outcome.ranks)
    if not lines:
        return
    text = f"{name}: {'; '.join(lines)}"
    if settings.strict:
        raise WorldFailed(f"the test leaked state (--strict-hygiene): {text}", outcome)
    warnings.warn(LeftBehindWarning(text), stacklevel=2)
