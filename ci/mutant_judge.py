"""Judges what lies in the tree that it is started in, one request after the other, for ci/sampled_mutants.py.

    python ci/mutant_judge.py FOLDER PACKAGE

It imports torch and the harness, and each request is answered by a fork of it. If it has not imported PACKAGE, whose code changes
between requests, its first line says that it serves many: each fork imports that package anew, here and on ranks, and nothing
else. Torch itself imports torch's FSDP; then it serves one. Requests and answers are lines of JSON on the standard streams.
FOLDER is for what it writes.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from fsdp_testing.adapters import registry
from fsdp_testing.cases.drawing import Scope
from fsdp_testing.cases.records import Case, CheckResult, Verdict
from fsdp_testing.checks import conformance
from fsdp_testing.checks.findings.known import shipped_known
from fsdp_testing.cli.run import expectations as of_file
from fsdp_testing.ranks.pool import default_pool
from fsdp_testing.search.campaign.campaign import Campaign, Plan
from fsdp_testing.search.campaign.tally import exit_code_of
from fsdp_testing.search.pairs.covering import covering
from fsdp_testing.search.state import Verdicts

KNOWN = Path("fsdp_testing/checks/findings/known_failures.toml")
CHUNK = 24
"""Cases that are asked together."""
SIZES = {"pairs": (2, 3, 4), "fuzz": (2, 3)}
"""Numbers of ranks, as the commands have them."""
DEADLINE = 30.0
_JOBS = len(os.sched_getaffinity(0))
_SERVER: list[str] = []
"""Name of the process that fork servers are forked from, once there is one."""
_READY = b"x"


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be judged.

    Attributes:
        kind: `parts` (what there is to ask), `run`, `tensor` (`run` on two by two ranks, over tensor parallelism), `pairs` or
            `fuzz`.
        name: Implementation.
        parts: Of `pairs` numbers of chunks of cases, of the other two names of checks; of `parts` the kind.
        seconds: How long to fuzz.
        limit: Seconds until it counts as hung.
        executed: File of bytes that the code under test sets where it comes along. With it all parts are asked, one by one, and
            the answer says which bytes each part sets; of pairs only the cases that pass are asked from then on.
    """

    kind: str
    name: str
    parts: tuple[str, ...] = ()
    seconds: float = 0.0
    limit: float = 1800.0
    executed: str = ""


@dataclass(slots=True)
class Answer:
    """What came of it.

    Attributes:
        parts: That there are to ask.
        failure: What fails first; empty if nothing does.
        unknown: How many verdicts are neither pass nor fail.
        executed: Part -> numbers of bytes that it sets.
        wrong: Parts with a failure, where all are asked.
        hung: It did not end in time.
        lost: The failure is no verdict: the harness itself stopped, died or hung.
    """

    parts: list[str] = field(default_factory=list)
    failure: str = ""
    unknown: int = 0
    executed: dict[str, list[int]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    hung: bool = False
    lost: bool = False


def chunks_of(folder: Path, name: str, *, drawn: bool = False) -> Path:
    """The file with the cases that hold every pair of traits, in chunks of one world size: all, or those that pass."""
    return folder / f"pairs-{name}{'-drawn' if drawn else ''}.json"


def parts_of_pairs(folder: Path, name: str) -> list[str]:
    """Draw the covering cases, write them, and return the numbers of their chunks."""
    scope = Scope(registry.load(name).drawable(1), SIZES["pairs"])
    waiting: dict[int, list[str]] = {size: [] for size in SIZES["pairs"]}
    chunks = []
    for case in covering(scope).cases:
        cases = waiting[case.world.size]
        cases.append(case.to_json())
        if len(cases) == CHUNK:
            chunks.append(cases)
            waiting[case.world.size] = []
    chunks += [cases for cases in waiting.values() if cases]
    chunks_of(folder, name, drawn=True).write_text(json.dumps(chunks), encoding="utf-8")
    return [str(number) for number in range(len(chunks))]


def by_campaign(request: Request, folder: Path, cases: Sequence[Case]) -> tuple[str, Verdicts]:
    """Run a campaign on these cases, or random ones: what fails first, and all verdicts."""
    adapter, state = registry.load(request.name), Path(tempfile.mkdtemp(prefix="state-", dir=folder))
    plan = Plan(
        adapter,
        Scope(adapter.drawable(1), SIZES[request.kind]),
        state,
        seconds=request.seconds or None,
        seed=1,
        deadline=DEADLINE,
        shrink_seconds=0.0,
        known=shipped_known(adapter.built_on),
        stop_at_first=True,
        listed=tuple(cases),
    )
    campaign = Campaign(plan, default_pool(), lambda _: None, lambda *_: None)
    tally = campaign.run()
    shutil.rmtree(state, ignore_errors=True)
    code = exit_code_of(tally.verdicts, tally.discovered)
    sentences = [discovery.sentence() for discovery in tally.discovered if discovery.confirmed]
    return (sentences or ["a case fails"])[0] if code == 1 else "", campaign.verdicts


class FirstFailure(Exception):
    """A check failed as is not known; what comes after it need not be judged."""


@dataclass(slots=True)
class UntilOneFails:
    """Hears what checks give.

    Attributes:
        unknown: How many are unknown.
    """

    unknown: int = 0

    def planned(self, total: int) -> None:
        """They will be judged."""

    def started(self, implementation: str, check: str) -> None:
        """One is judged."""

    def finished(self, result: CheckResult) -> None:
        """Raise `FirstFailure` where a check failed."""
        self.unknown += result.verdict is Verdict.UNKNOWN
        if result.verdict is Verdict.FAIL:
            raise FirstFailure(f"{result.check}: {result.explanation}")


def by_checks(kind: str, name: str, checks: Sequence[str], jobs: int) -> tuple[str, int]:
    """Judge checks until one fails as is not known: how it does, and how many before it are unknown."""
    parts, heard = (2 if kind == "tensor" else 1), UntilOneFails()
    try:
        conformance.run_conformance(
            name,
            checks=checks,
            world_sizes=(4,) if kind == "tensor" else None,
            tensor_parallel=parts,
            expected_failures=of_file(KNOWN, (name,), parts),
            explain=0,
            listener=heard,
            jobs=jobs,
        )
    except FirstFailure as failure:
        return str(failure), heard.unknown
    return "", heard.unknown


def ask(request: Request, folder: Path) -> Iterator[tuple[str, str, int]]:
    """Ask part by part, or all cases at once: the part, what fails, and how many are unknown."""
    if request.kind in ("run", "tensor"):
        # One by one where what each executes is measured.
        groups = [(part,) for part in request.parts] if request.executed else [request.parts]
        for group in groups:
            yield (group[0], *by_checks(request.kind, request.name, group, 1 if request.executed else _JOBS))
        return
    adapter, runner = registry.load(request.name), conformance.shared_runner()
    file = chunks_of(folder, request.name, drawn=bool(request.executed))
    chunks: list[list[str]] = json.loads(file.read_text(encoding="utf-8")) if request.kind == "pairs" else []
    if request.executed:
        for number, texts in enumerate(chunks):
            judged = runner.judge_batch(adapter, [*map(Case.from_json, texts)])
            chunks[number] = [text for text, case in zip(texts, judged) if case.verdict is Verdict.PASS]
            yield str(number), "", len(texts) - len(chunks[number])
        # Whole or not at all: another run may read it.
        part = Path(tempfile.mkdtemp(dir=folder)) / "passing"
        part.write_text(json.dumps(chunks), encoding="utf-8")
        part.replace(chunks_of(folder, request.name))
        return
    cases = [Case.from_json(text) for part in request.parts for text in chunks[int(part)]]
    if cases or request.kind == "fuzz":  # which has no parts
        failure, verdicts = by_campaign(request, folder, cases)
        yield "", failure, len(verdicts.numbers(Verdict.UNKNOWN))


def answer(request: Request, folder: Path) -> Answer:
    """Judge what is asked."""
    reply = Answer()
    if request.kind == "parts":
        checks = [check.name for check in conformance.select_checks((), extended=True)]
        reply.parts = parts_of_pairs(folder, request.name) if request.parts == ("pairs",) else checks
        return reply
    seen = None
    if request.executed:
        with Path(request.executed).open("r+b") as stream:
            seen = mmap.mmap(stream.fileno(), 0)
    for part, failure, unknown in ask(request, folder):
        reply.unknown += unknown
        reply.failure = reply.failure or failure
        if seen is not None:
            reply.executed[part] = [number for number, byte in enumerate(seen[:]) if byte]
            seen[:] = bytes(len(seen))
            reply.wrong += [part] if failure else []
        elif failure:
            break
    return reply


def in_a_fork(request: Request, folder: Path, asker: int, judge: Callable[[Request, Path], Answer] = answer) -> Answer:
    """Judge in a process of its own, with ranks of its own; end all of it when the time is over.

    Args:
        request: What is asked.
        folder: For what is written.
        asker: Descriptor that requests come over; at its end nobody waits for an answer any more.
        judge: Does it.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _be_judge(request, folder, writing, judge)
    os.close(writing)
    end, text, hung = time.monotonic() + request.limit, b"", False
    while not hung:
        ready = select.select([reading, asker], [], [], max(0.0, end - time.monotonic()))[0]
        hung = not ready
        if asker in ready:
            break  # who asked has gone: there is no further request before the answer
        if reading in ready:
            read = os.read(reading, 1 << 16)
            if not read:
                break
            text += read
    os.close(reading)
    for end_it in (os.killpg, os.kill):  # it may not lead its group yet
        with contextlib.suppress(ProcessLookupError):
            end_it(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    if hung:
        return Answer(failure=f"not ended after {request.limit:.0f} s", hung=True, lost=True)
    return Answer(**json.loads(text)) if text else Answer(failure="the judging process died", lost=True)


def _be_judge(request: Request, folder: Path, writing: int, judge: Callable[[Request, Path], Answer]) -> NoReturn:
    os.setsid()
    try:
        pool = default_pool()
        pool.run = "".join(_SERVER)
        try:
            reply = judge(request, folder)
        except Exception as error:  # noqa: BLE001 - what makes the harness itself stop is never a pass
            reply = Answer(failure=f"{type(error).__name__}: {error}"[:300], lost=True)
        # Before the ranks end: their end is no part of the verdict.
        with os.fdopen(writing, "wb") as stream:
            stream.write(json.dumps(asdict(reply)).encode())
        pool.close()
    finally:
        os._exit(0)


def keep_server() -> None:
    """Keep the process that fork servers are forked from, in a child that has one: it ends with the last that does."""
    _SERVER.append(f"mutants-{os.getpid()}")
    reading, writing = os.pipe()
    ready, started = os.pipe()
    if os.fork() == 0:
        os.close(writing)
        os.close(ready)
        pool = default_pool()
        pool.run = _SERVER[0]
        pool.add_preload("torch._dynamo", *(name for name in sorted(sys.modules) if name.startswith("fsdp_testing.")))
        with pool.lend(1):
            os.write(started, _READY)
            os.read(reading, 1)  # until this process's parent has ended
        pool.close()
        os._exit(0)
    os.close(reading)
    os.close(started)
    if os.read(ready, 1) != _READY:
        raise RuntimeError("no rank could be started")


def main() -> int:
    """Answer requests until there are no more."""
    folder, answers = Path(sys.argv[1]), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what anything else prints is no answer
    serves_many = sys.argv[2] not in sys.modules
    if serves_many:
        keep_server()
    print(json.dumps({"serves many": serves_many}), file=answers, flush=True)
    for line in sys.stdin:
        given: dict[str, Any] = json.loads(line)
        request = Request(**{**given, "parts": tuple(given.get("parts", ()))})
        print(json.dumps(asdict(in_a_fork(request, folder, sys.stdin.fileno()))), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
