"""Watches a job to its end: every rank's report, death or silence, within the deadline and the grace period.

The grace period starts with the first bad news: the others get half a second to give their own account, and longer while
one of them computes; then their stacks are taken and they are stopped. A rank that waits for one that has already
returned is bad news too; the ledger in shared memory shows it without asking either of them.
"""

from __future__ import annotations

import contextlib
import re
import selectors
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdp_testing.base.backends import backend_named
from fsdp_testing.ranks.ledger.reading import RankLedger
from fsdp_testing.ranks.pool.cause import NotJoined, cause_of, different_collectives
from fsdp_testing.ranks.pool.channel import dumps, loads
from fsdp_testing.ranks.pool.jobs import Exit, Job, Report
from fsdp_testing.ranks.pool.outcome import ErrorRecord, Fate, RankOutcome, WorldOutcome, account_lines
from fsdp_testing.ranks.pool.processes import RankProcess
from fsdp_testing.ranks.pool.remote_rank import RemoteRank

GRACE_SECONDS = 0.5
# On a busy machine a rank lags seconds behind another. It should raise the same error, not be found waiting.
_LATE_SECONDS = 5.0
_IDLE_SECONDS = 0.25
_POLL_SECONDS = 0.1
_LONGEST_WAIT = 86_400.0  # seconds; epoll takes no more than 24 days, and deadlines are looked at again after each wait
_LOOK_SECONDS = 0.02
_STACK_SECONDS = 0.8
_QUIET_LOOKS = 20  # 10 ms apart; a busy machine stops a rank between any two lines of its stack
_OUTERMOST = re.compile(r'  File "<string>", line \d+ in <module>\n\Z')  # the fork server's own command
_JOIN_SECONDS = 60.0
_EXIT_SECONDS = 5.0


@dataclass(slots=True, eq=False)
class _RankWatch:
    """What is known about one rank so far."""

    process: RankProcess | RemoteRank
    report: Report | None = None
    exit: Exit | None = None
    joined: bool = False
    join_problem: ErrorRecord | None = None
    stack: str = ""
    output: dict[str, str] = field(default_factory=dict)
    computed_at: float = 0.0

    @property
    def ended(self) -> bool:
        return self.report is not None or self.exit is not None

    @property
    def bad(self) -> bool:
        if self.report is not None:
            return self.report.failed
        return self.exit is not None or bool(self.process.channel.problem)


@dataclass(slots=True)
class Supervision:
    """One job on one world, from sending to the outcome.

    `joined` says that every rank has joined its world; a new world has its own time to join, before the job's clock
    starts. `lockstep` says that ranks must issue the same collectives: a rank that left early is bad news. `patient`: no rank is
    stopped for bad news; a failed rank exits, as a launcher's process does, so that peers lose its connections.
    """

    processes: Sequence[RankProcess | RemoteRank]
    job: Job
    size: int
    backend: str
    timeout: float | None
    single_process: bool = False
    lockstep: bool = True
    joined: bool = False
    patient: bool = False
    new_modules: dict[str, None] = field(default_factory=dict)
    worn: bool = False

    def run(self) -> WorldOutcome:
        """Send the job once all are in the world, watch it, and judge every rank.

        Kills no rank: the owner of the world does, when not `ok`.
        """
        started = time.monotonic()
        watches = [_RankWatch(process, joined=self.joined) for process in self.processes]
        for watch in watches:
            # What was written after the end of an earlier job must not pass for output of this one.
            watch.process.take_output("stacks")
            watch.process.empty_output()
        try:
            passed_deadline = self._watch(watches, started)
        except BaseException as end:  # Ctrl-C, or a time limit that another plugin sets
            end.add_note(self._account_of_running(watches))
            raise
        running = [watch for watch in watches if not watch.ended]
        for watch in running:
            # The last news of a rank on another host, before it is touched; on this machine this does not wait.
            watch.process.look(wait=True)
            if isinstance(watch.process, RemoteRank):
                watch.exit = watch.process.read_exit()  # its host may have vanished
        running = [watch for watch in running if not watch.ended]
        # Before stacks are asked for: the signal may end a system call that the rank was stuck in.
        ledgers = [watch.process.ledger.read(self.job.number) for watch in watches]
        if running:
            self._take_stacks(running)
        late = [watch for watch in running if not watch.joined] if passed_deadline else []
        # A rank that waits for a late one to join the world does not hang.
        hung = (late or running) if passed_deadline else []
        outcomes = tuple(
            self._outcome(watch, ledger, hung=watch in hung) for watch, ledger in zip(watches, ledgers, strict=True)
        )
        members = {key: ranks for ledger in ledgers for key, ranks in ledger.members.items()}
        # If ranks make groups of their own, a missing collective proves nothing; a different one does.
        cause = cause_of(outcomes, members if self.lockstep else {}, self.timeout if passed_deadline else None)
        cause = cause or different_collectives(outcomes, members)
        if late:
            cause = NotJoined(tuple(watch.process.rank for watch in late), _JOIN_SECONDS)
        return WorldOutcome(self.job.name, self.size, self.backend, outcomes, cause, time.monotonic() - started)

    def _account_of_running(self, watches: list[_RankWatch]) -> str:
        """Return where each rank that has not ended is, for an exception that ends the watching."""
        running = [watch for watch in watches if not watch.ended]
        ledgers = [watch.process.ledger.read(self.job.number) for watch in running]
        self._take_stacks(running)
        lines = [f"{self.job.name}: {len(running)} of {len(watches)} ranks were running"]
        for watch, ledger in zip(running, ledgers, strict=True):
            outcome = self._outcome(watch, ledger, hung=False)
            lines += [outcome.headline(), *account_lines(outcome)]
        return "\n".join(lines)

    def _send(self, watches: list[_RankWatch]) -> None:
        # Only when all have joined: otherwise a rank that dies in its call could break the joining of another, and that one
        # would be reported as unable to join.
        job = dumps(self.job)
        for watch in watches:
            # A dead rank is known by its exit status, not by the failed write.
            with contextlib.suppress(OSError):
                watch.process.channel.send_data(job)

    def _watch(self, watches: list[_RankWatch], started: float) -> bool:
        """Wait until all have ended, or the grace period or deadline ends; True when the deadline did it."""
        # Two clocks, one after the other: joining the world uses none of the call's time.
        deadline: float | None = started + _JOIN_SECONDS
        stop_at: float | None = None
        # Most jobs have ended by then, and reading ledgers would take time from ranks that are about to end.
        look_at = started + _LOOK_SECONDS
        # Not epoll, which takes a system call for each source: nearly always a job ends after the first few events.
        with selectors.PollSelector() as selector:
            self._listen(selector, watches)
            clock_runs = False
            while True:
                running = [watch for watch in watches if not watch.ended]
                now = time.monotonic()
                if not clock_runs and all(watch.joined for watch in watches):
                    clock_runs = self.joined = True
                    self._send(watches)
                    # Sending large arguments takes time, which is not the call's.
                    now = time.monotonic()
                    deadline = None if self.timeout is None else now + self.timeout
                if not running:
                    return False
                bad = any(watch.bad for watch in watches)
                if (
                    not self.patient
                    and stop_at is None
                    and (bad or (now >= look_at and self._peer_already_left(watches)))
                ):
                    stop_at = now + GRACE_SECONDS
                look_at = now + _POLL_SECONDS if now >= look_at else look_at
                if stop_at is not None:
                    if self._account_to_come(running, now, stop_at):
                        self._wait(selector, now, now + _POLL_SECONDS, None, some_ended=True)
                        continue
                    if now >= stop_at and (bad or self._peer_already_left(watches)):
                        return False
                    if now >= stop_at:
                        stop_at = None  # the collective was taken back
                if deadline is not None and now >= deadline:
                    return True
                some_ended = len(running) < len(watches)
                wake_at = look_at if stop_at is None and some_ended else stop_at
                self._wait(selector, now, wake_at, deadline, some_ended=some_ended)

    def _listen(self, selector: selectors.BaseSelector, watches: list[_RankWatch]) -> None:
        for watch in watches:
            for source in watch.process.sources:
                selector.register(source, selectors.EVENT_READ, watch)
            # Reading old output may have consumed a new rank's message, and then nothing would wake us.
            if isinstance(watch.process, RemoteRank):
                self._take_news(selector, watch)

    def _wait(
        self,
        selector: selectors.BaseSelector,
        now: float,
        stop_at: float | None,
        deadline: float | None,
        *,
        some_ended: bool,
    ) -> None:
        limits = [limit - now for limit in (stop_at, deadline) if limit is not None]
        if some_ended:
            limits.append(_POLL_SECONDS)
        for key, _ in selector.select(max(0.0, min(*limits, _LONGEST_WAIT)) if limits else None):
            watch: _RankWatch = key.data
            if key.fileobj is not watch.process.channel:
                # The rank's last messages are still in the channel, and a report outranks the exit status (`_ending`).
                watch.exit = watch.process.read_exit()
                self._forget(selector, key.fileobj)
            self._take_news(selector, watch)

    def _take_news(self, selector: selectors.BaseSelector, watch: _RankWatch) -> None:
        for message in watch.process.channel.take_ready():
            if message.number == 0:
                watch.joined, watch.join_problem = message.error is None, message.error
            elif message.number == self.job.number:
                watch.report = message
                if self.patient and message.failed:
                    watch.process.kill()
                self.new_modules.update(dict.fromkeys(message.new_modules))
                self.worn |= message.worn
        if watch.process.channel.closed:
            self._forget(selector, watch.process.channel)
        if isinstance(watch.process, RemoteRank):
            watch.exit = watch.process.read_exit()  # it came as a message, or its connection has ended

    def _forget(self, selector: selectors.BaseSelector, what: Any) -> None:
        with contextlib.suppress(KeyError, ValueError):
            selector.unregister(what)

    def _peer_already_left(self, watches: list[_RankWatch]) -> bool:
        """A running rank has issued a collective that a returned member of its group never joined, or was refused."""
        if not self.lockstep or all(not watch.ended for watch in watches):
            return False
        epoch = self.job.number
        gone = {watch.process.rank: watch.process.ledger for watch in watches if watch.ended}
        running = [watch.process for watch in watches if not watch.ended]
        if any(ledger.refused(epoch) for ledger in gone.values()):
            return True
        issued = {rank: ledger.counts(epoch) for rank, ledger in gone.items()}
        for process in running:
            process.look()
            behind = {
                key: [peer for peer in gone if issued[peer].get(key, 0) < count]
                for key, count in process.ledger.counts(epoch).items()
            }
            if not any(behind.values()):
                continue
            # Counts are cheap and nearly always say that nothing is missing; members are read only where a count lags behind.
            members = process.ledger.read(epoch, 1).members
            for key, missing in behind.items():
                # A full ledger does not show how often its rank used the group.
                countable = [peer for peer in missing if key in issued[peer] or not gone[peer].uncompared()]
                if any(peer in members.get(key, ()) for peer in countable):
                    return True
        return False

    def _account_to_come(self, running: list[_RankWatch], now: float, stop_at: float) -> bool:
        """Check which ranks compute; after the grace period, return whether some rank is about to report."""
        # On devices a waiting rank spins, so this cannot tell.
        if backend_named(self.backend).device_type == "cpu":
            for watch in running:
                if watch.process.computes():
                    watch.computed_at = now
        if now < stop_at:
            return False
        # A channel that closed without a report: its rank is dead or dying, and the exit status on its way. On a loaded machine
        # a peer's connection error comes long before; the death must lead the account all the same.
        if any(watch.process.channel.closed for watch in running):
            return now < stop_at + _EXIT_SECONDS
        return now < stop_at + _LATE_SECONDS and any(now - watch.computed_at < _IDLE_SECONDS for watch in running)

    def _take_stacks(self, watches: list[_RankWatch]) -> None:
        for watch in watches:
            # Read before: Python walks the frames of running threads, which may crash the process. Its message then
            # ("Segmentation fault") is not the job's output.
            watch.output = {name: watch.process.take_output(name) for name in ("stdout", "stderr")}
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
                left = watch.process.read_exit()
                if left is not None:
                    watch.stack += (
                        f"[the process ended ({left.signal_name or left.code}) while its stacks were taken]\n"
                    )
                    waiting.remove(watch)
                elif quiet[watch.process.rank] >= _QUIET_LOOKS or _OUTERMOST.search(watch.stack[-80:]):
                    waiting.remove(watch)

    def _outcome(self, watch: _RankWatch, ledger: RankLedger, *, hung: bool) -> RankOutcome:
        process = watch.process
        output = watch.output or {name: process.take_output(name) for name in ("stdout", "stderr")}
        return RankOutcome(
            rank=self.job.place.rank if self.job.place is not None else process.rank,
            stdout=output["stdout"],
            stderr=output["stderr"],
            stack=watch.stack,
            collectives=ledger.entries,
            issued=ledger.issued,
            digests=ledger.digests,
            uncompared=ledger.uncompared,
            began=ledger.begun or process.lost,
            **_ending(watch, hung=hung),
        )


def _ending(watch: _RankWatch, *, hung: bool) -> dict[str, Any]:
    """Return the fate of a rank and its result as fields of `RankOutcome`."""
    # Most reliable first: how joining failed, the rank's own report, its exit, garbage in its channel. Only a rank without any of
    # these hung or was stopped.
    report, left, garbled = watch.report, watch.exit, watch.process.channel.problem
    if watch.join_problem is not None:
        return _raised(watch.join_problem)
    if report is not None:
        facts = {"seconds": report.seconds, "finished_at": report.finished_at, "dirt": report.dirt}
        if report.error is not None:
            return _raised(report.error) | facts
        try:
            return {"fate": Fate.RETURNED, "value": loads(report.payload), "failed": report.failed, **facts}
        except Exception as problem:
            text = f"the result could not be read in the controller: {type(problem).__name__}: {problem}"
            return _raised(ErrorRecord("ResultUnreadable", text, text)) | facts
    if left is not None:
        how = {"exit_code": left.code, "signal_name": left.signal_name, "finished_at": left.moment}
        return {"fate": Fate.DIED, "failed": True, **how}
    if garbled:
        text = f"the rank sent no valid message ({garbled}): its code wrote to, or closed, a descriptor"
        return _raised(ErrorRecord("ChannelGarbled", text, text))
    return {"fate": Fate.HUNG if hung else Fate.STOPPED, "failed": True}


def _raised(error: ErrorRecord) -> dict[str, Any]:
    return {"fate": Fate.RAISED, "failed": True, "error": error}
