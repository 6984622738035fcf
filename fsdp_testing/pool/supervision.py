"""How is a job watched to its end? Every rank's report, death or silence, within the deadline and the grace period.

The grace period starts with the first bad news: the others get half a second to give their own account, then their
stacks are taken and they are stopped. A rank that waits for one that has already returned is bad news too; the ledger
in shared memory tells it without asking either of them.
"""

from __future__ import annotations

import contextlib
import selectors
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdp_testing.ledger.memory import LedgerMemory
from fsdp_testing.ledger.reading import RankLedger, read_rank
from fsdp_testing.pool.channel import loads
from fsdp_testing.pool.diagnosis import cause_of
from fsdp_testing.pool.jobs import Job, Joined, Report
from fsdp_testing.pool.outcome import CollectiveRecord, ErrorRecord, Fate, RankOutcome, WorldOutcome
from fsdp_testing.pool.processes import Exit, RankProcess

GRACE_SECONDS = 0.5
_LOOK_SECONDS = 0.1
_STACK_SECONDS = 0.3
_EXIT_SECONDS = 1.0


@dataclass(slots=True)
class _Watch:
    """What is known about one rank so far."""

    process: RankProcess
    report: Report | None = None
    exit: Exit | None = None
    join_problem: Joined | None = None
    timed_out: bool = False
    stack: str = ""

    @property
    def settled(self) -> bool:
        return self.report is not None or self.exit is not None

    @property
    def bad(self) -> bool:
        return self.exit is not None or (self.report is not None and self.report.failed)


@dataclass(slots=True)
class Supervision:
    """One job on one world, from sending to the outcome."""

    processes: Sequence[RankProcess]
    ledger: LedgerMemory
    job: Job
    size: int
    backend: str
    timeout: float | None
    single_process: bool = False
    new_modules: set[str] = field(default_factory=set)

    def run(self) -> WorldOutcome:
        """Send the job, watch it, and judge every rank. Kills nobody: the owner of the world does, when not `ok`."""
        started = time.monotonic()
        watches = [_Watch(process) for process in self.processes]
        for watch in watches:
            watch.process.take_output("stacks")
            self._send(watch)
        passed_deadline = self._watch(watches, started)
        unsettled = [watch for watch in watches if not watch.settled]
        if unsettled:
            self._take_stacks(unsettled)
        outcomes = tuple(self._outcome(watch, passed_deadline) for watch in watches)
        members: dict[int, tuple[int, ...]] = {}
        if not self.single_process:
            for outcome in watches:
                members.update(self._ledger_of(outcome.process.rank, 1).members)
        cause = cause_of(outcomes, members, self.timeout if passed_deadline else None)
        return WorldOutcome(self.job.name, self.size, self.backend, outcomes, cause, time.monotonic() - started)

    def _send(self, watch: _Watch) -> None:
        # A rank that is gone is told by its exit status, not by the failed write.
        with contextlib.suppress(OSError):
            watch.process.channel.send(self.job)

    def _watch(self, watches: list[_Watch], started: float) -> bool:
        """Wait until all are settled, or the grace period or deadline ends; True when the deadline did it."""
        deadline = None if self.timeout is None else started + self.timeout
        stop_at: float | None = None
        with selectors.DefaultSelector() as selector:
            for watch in watches:
                selector.register(watch.process.channel, selectors.EVENT_READ, watch)
                selector.register(watch.process.status_fd, selectors.EVENT_READ, watch)
            while True:
                unsettled = [watch for watch in watches if not watch.settled]
                now = time.monotonic()
                if not unsettled:
                    return False
                if stop_at is None and (any(w.bad for w in watches) or self._someone_waits_in_vain(watches)):
                    stop_at = now + GRACE_SECONDS
                if stop_at is not None and now >= stop_at:
                    return False
                if deadline is not None and now >= deadline:
                    return True
                self._wait(selector, now, stop_at, deadline, some_settled=len(unsettled) < len(watches))

    def _wait(
        self, selector: selectors.BaseSelector, now: float, stop_at: float | None, deadline: float | None, *, some_settled: bool
    ) -> None:
        limits = [limit - now for limit in (stop_at, deadline) if limit is not None]
        if some_settled:
            limits.append(_LOOK_SECONDS)
        for key, _ in selector.select(max(0.0, min(limits)) if limits else None):
            watch: _Watch = key.data
            if key.fileobj is watch.process.channel:
                self._take_messages(selector, watch)
            else:
                watch.exit = watch.process.read_exit()
                self._forget(selector, watch.process.status_fd)
                self._take_messages(selector, watch)

    def _take_messages(self, selector: selectors.BaseSelector, watch: _Watch) -> None:
        for message in watch.process.channel.take_ready():
            if isinstance(message, Joined):
                watch.join_problem = message if message.problem else None
            elif isinstance(message, Report) and message.number == self.job.number:
                watch.report = message
                self.new_modules.update(message.new_modules)
        if watch.process.channel.closed:
            self._forget(selector, watch.process.channel)

    def _forget(self, selector: selectors.BaseSelector, what: Any) -> None:
        with contextlib.suppress(KeyError, ValueError):
            selector.unregister(what)

    def _ledger_of(self, rank: int, last: int = 8) -> RankLedger:
        return read_rank(self.ledger.areas[0 if self.single_process else rank], self.job.number, last)

    def _someone_waits_in_vain(self, watches: list[_Watch]) -> bool:
        """A running rank has issued a collective that a returned member of its group never joined."""
        if self.single_process or all(not watch.settled for watch in watches):
            return False
        ledgers = {watch.process.rank: self._ledger_of(watch.process.rank, 1) for watch in watches}
        gone = [watch.process.rank for watch in watches if watch.settled]
        for watch in watches:
            if watch.settled:
                continue
            mine = ledgers[watch.process.rank]
            for key, count in mine.issued.items():
                members = mine.members.get(key, ())
                if any(rank in members and ledgers[rank].issued.get(key, 0) < count for rank in gone):
                    return True
        return False

    def _take_stacks(self, watches: list[_Watch]) -> None:
        for watch in watches:
            watch.process.request_stacks()
        limit = time.monotonic() + _STACK_SECONDS
        waiting = list(watches)
        quiet: dict[int, int] = {}
        while waiting and time.monotonic() < limit:
            time.sleep(0.01)
            for watch in list(waiting):
                text = watch.process.take_output("stacks")
                watch.stack += text
                quiet[watch.process.rank] = 0 if text else quiet.get(watch.process.rank, 0) + bool(watch.stack)
                if quiet[watch.process.rank] >= 3:
                    waiting.remove(watch)

    def _outcome(self, watch: _Watch, passed_deadline: bool) -> RankOutcome:
        process = watch.process
        ledger = self._ledger_of(process.rank)
        shared: dict[str, Any] = {
            "rank": self.job.place.rank if self.job.place is not None else process.rank,
            "stdout": process.take_output("stdout"),
            "stderr": process.take_output("stderr"),
            "collectives": tuple(
                CollectiveRecord(e.number, e.group, e.group_key, e.what, e.call_site, e.moment_ns) for e in ledger.entries
            ),
            "issued": ledger.issued,
            "digests": ledger.digests,
        }
        if watch.join_problem is not None:
            problem = watch.join_problem
            error = ErrorRecord("WorldNotJoined", f"the rank could not join its world: {problem.problem}", problem.traceback)
            return RankOutcome(fate=Fate.RAISED, failed=True, error=error, **shared)
        if watch.report is not None:
            return _reported(watch.report, shared)
        if watch.exit is not None:
            return RankOutcome(
                fate=Fate.DIED, failed=True, exit_code=watch.exit.code, signal_name=watch.exit.signal_name, **shared
            )
        fate = Fate.HUNG if passed_deadline else Fate.STOPPED
        return RankOutcome(fate=fate, failed=True, stack=watch.stack, **shared)


def _reported(report: Report, shared: dict[str, Any]) -> RankOutcome:
    times: dict[str, Any] = {"seconds": report.seconds, "finished_at": report.finished_at, "dirt": report.dirt}
    if report.error_type:
        error = ErrorRecord(report.error_type, report.error_message, report.error_traceback)
        return RankOutcome(fate=Fate.RAISED, failed=True, error=error, **times, **shared)
    try:
        value = loads(report.payload)
    except Exception as problem:
        text = f"the result could not be read in the controller: {type(problem).__name__}: {problem}"
        return RankOutcome(
            fate=Fate.RAISED, failed=True, error=ErrorRecord("ResultUnreadable", text, text), **times, **shared
        )
    return RankOutcome(fate=Fate.RETURNED, value=value, failed=report.failed, **times, **shared)
