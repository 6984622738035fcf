"""Judges implementations in one call, without pytest and without a command line."""

from __future__ import annotations

import difflib
import functools
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from fsdp_testing.adapters import registry, validation
from fsdp_testing.adapters.adapter import Adapter
from fsdp_testing.base.backends import backend_named
from fsdp_testing.cases.records import Case, CheckResult, Portrait, Request, RunReport, check_case
from fsdp_testing.checks import suites
from fsdp_testing.checks.suites import CHECKS, Check
from fsdp_testing.checks.suites.check import needs_of
from fsdp_testing.checks.suites.run import Where, judge_check
from fsdp_testing.errors import BackendUnavailable, InvalidArgument, PoolBroken
from fsdp_testing.explain.inquiry import Inquiry, JudgeSettings
from fsdp_testing.explain.root_causes import explain_results, happened
from fsdp_testing.explain.shrinking.shrink import EXPLAIN_SECONDS
from fsdp_testing.explain.trace import portrait
from fsdp_testing.judging.case_runner import CaseRunner, JudgedCase
from fsdp_testing.judging.expected import Expectation, as_expected, digest, expectations
from fsdp_testing.judging.worlds import Shared
from fsdp_testing.ranks.pool import Pool, default_pool


class RunListener(Protocol):
    """Progress events of a run; a listener observes and never changes the run."""

    def planned(self, total: int) -> None:
        """Called once: `total` pairs of check and implementation will be judged."""
        ...

    def started(self, implementation: str, check: str) -> None:
        """Called when this pair starts."""
        ...

    def finished(self, result: CheckResult) -> None:
        """Its result."""
        ...


def run_conformance(
    *names: str,
    world_sizes: Sequence[int] | None = (2,),
    tensor_parallel: int = 1,
    backend: str = "gloo",
    checks: Sequence[str] = (),
    shard: tuple[int, int] | tuple[()] = (),
    expected_failures: Mapping[str, Any] | None = None,
    extended: bool = False,
    explain: float = EXPLAIN_SECONDS,
    portraits: bool = False,
    listener: RunListener | None = None,
    runner: CaseRunner | None = None,
    jobs: int = 1,
) -> RunReport:
    """Judge implementations by name.

    Args:
        *names: Registered names or import strings `package.module:attribute`.
        world_sizes: Numbers of ranks; None for each check's own: 2, also 3 if the number matters, 4 for hybrid sharding, and
            8 for how gradients are divided, where the backend has as many devices.
        tensor_parallel: How many of them share one model: torch's tensor parallelism cuts modules over these, and
            implementations that claim it shard over the others. It divides every world size.
        backend: Backend of the worlds.
        checks: Patterns (fnmatch) of check names, or names of suites; all of the profile by default. A check named without
            wildcards runs in any profile.
        shard: `(i, n)`: judge only the i-th of n parts, counted from 1, of the pairs of implementation and check.
        expected_failures: How each check fails, by name, for all implementations: the fields of `ExpectedFailure` as a
            mapping, or a list of such. Or one such mapping per implementation. Any other failure is new.
        extended: Run the extended profile too; without `world_sizes` it always runs.
        explain: Seconds (of an idle machine) to spend on the failures of one implementation, to find the shortest schedule
            for each root cause; 0 skips this.
        portraits: Trace one short program under each flat strategy, on implementations that claim `unit_trace`, for drawings
            of the report.
        listener: Is told about progress.
        runner: The runner of cases; by default `shared_runner()`.
        jobs: Checks that run at a time, each on its own worlds. Results, their order and the calls of the listener are the
            same for any number.

    Returns:
        One result for every implementation and check.

    Raises:
        InvalidArgument: An unknown name, pattern, or expectation; nothing has run then.
        InvalidImplementation: An adapter that cannot be loaded or does not follow the protocol.
        BackendUnavailable: The backend cannot run here; the message gives the one reason.
    """
    start = time.perf_counter()
    adapters = load_all(names)
    selected = select_checks(checks, extended=extended or world_sizes is None)
    expected = expectations(expected_failures, names, CHECKS)
    where = _place(world_sizes, backend, tensor_parallel, selected)
    if not isinstance(jobs, int) or isinstance(jobs, bool) or jobs < 1:
        raise InvalidArgument(f"jobs: expected a number of at least 1, got {jobs!r}. Give 1 or more.")
    runner = runner or shared_runner()
    _examine(adapters.values(), runner, where, jobs, selected)
    first, of = shard or (1, 1)
    pairs = [(name, check) for name in adapters for check in selected][first - 1 :: of]
    hanging = {(name, check) for name, table in expected.items() for check, entry in table.items() if entry.lists_hangs}
    judge = partial(partial, judge_check, runner)
    tasks = [judge(adapters[name], check, where, past_hangs=(name, check.name) in hanging) for name, check in pairs]
    if listener is not None:
        listener.planned(len(pairs))
    with closing(runner.side_by_side(tasks, jobs)) as answers:
        results = list(_heard(pairs, answers, expected, listener, runner))
    explained = tuple(results)
    if explain > 0:
        explained = explain_results(results, how_of, runner, explain, draw=portraits)
    return RunReport(
        results=explained,
        implementations=tuple(adapters),
        environment=environment(),
        world_sizes=where.sizes(*selected),
        backend=backend,
        tensor_parallel=tensor_parallel,
        # One by one, because they show times.
        portraits=tuple(_portraits(adapters, where, runner, selected)) if portraits else (),
        seconds=time.perf_counter() - start,
        shard=shard,
        request=Request(tuple(check.name for check in selected), extended, digest(expected)),
    )


def _heard(
    pairs: Sequence[tuple[str, Check]],
    answers: Iterator[CheckResult],
    expected: Mapping[str, Mapping[str, Expectation]],
    listener: RunListener | None,
    runner: CaseRunner,
) -> Iterator[CheckResult]:
    """Yield the result of each pair with the user's expectations, and inform the listener at its turn."""
    for name, check in pairs:
        if listener is not None:
            listener.started(name, check.name)
        result = next(answers)
        if check.name in expected[name]:
            result = expecting(result, expected[name][check.name], runner)
        if listener is not None:
            listener.finished(result)
        yield result


def expecting(result: CheckResult, expectation: Expectation, runner: CaseRunner) -> CheckResult:
    """Apply the user's expected failures to a result; causes are searched for only if an entry names one."""
    how, inquiry = how_of(result.check), Inquiry(runner, result.implementation)
    return as_expected(result, expectation, lambda finding: happened(inquiry, finding, how) if how is not None else "")


def how_of(check: str) -> JudgeSettings | None:
    """How a check judges single programs; None for a check with its own judge."""
    found = CHECKS.get(check)
    return JudgeSettings(found.comparison, found.mode) if found is not None and found.judge is None else None


def _portraits(
    adapters: Mapping[str, Adapter], where: Where, runner: CaseRunner, selected: Sequence[Check]
) -> Iterator[Portrait]:
    """One short run of each implementation that reports its units, under each strategy that it claims."""
    sizes = [size for size in where.sizes(*selected) if size > 1 and where.tensor_parallel == 1]
    for name, adapter in adapters.items() if sizes and where.backend == "gloo" else ():
        for strategy in portrait.STRATEGIES:
            case = portrait.portrait_case(strategy, min(sizes))
            if needs_of(case) | {"unit_trace", "nested_wrapping"} <= adapter.capabilities:
                try:
                    yield portrait.take(name, case, runner.on_ranks)
                except PoolBroken:
                    if not runner.pool.given_up:
                        raise
                    return


def run_check(
    name: str,
    check: str,
    *,
    world_sizes: Sequence[int] | None = (2,),
    tensor_parallel: int = 1,
    backend: str = "gloo",
    runner: CaseRunner | None = None,
    stop_at_first: bool = False,
    expected: Expectation | None = None,
) -> CheckResult:
    """Judge one check on one implementation; only causes that an expected failure names are searched for.

    Args:
        name: Implementation.
        check: Name of the check.
        world_sizes: Numbers of ranks, as for `run_conformance`.
        tensor_parallel: How many ranks share one model, as for `run_conformance`.
        backend: Backend of the worlds.
        runner: The runner of cases; by default `shared_runner()`.
        stop_at_first: Run no further case of the check once one has refuted it.
        expected: How it is known to fail.

    Raises:
        InvalidArgument: As `run_conformance`, which also raises the other errors.
    """
    adapters = load_all((name,))
    selected = select_checks((check,))
    where = _place(world_sizes, backend, tensor_parallel, selected)
    runner = runner or shared_runner()
    _examine(adapters.values(), runner, where, 1, selected)
    past_hangs = expected is not None and expected.lists_hangs
    result = judge_check(runner, adapters[name], selected[0], where, stop_at_first=stop_at_first, past_hangs=past_hangs)
    return result if expected is None else expecting(result, expected, runner)


def run_case(name: str, case: Case, *, runner: CaseRunner | None = None, **comparison: Any) -> JudgedCase:
    """Run one case, as a replay does: the same case gives the same numbers.

    Args:
        name: Implementation.
        case: The case.
        runner: The runner of cases; by default `shared_runner()`.
        **comparison: Fields of `fsdp_testing.oracle.quantities.Comparison`.

    Raises:
        InvalidRecord: The case is not legal.
    """
    from fsdp_testing.oracle.quantities import Comparison

    check_case(case)
    load_all((name,))
    return (runner or shared_runner()).judge(name, case, Comparison(**comparison))


def shared_runner() -> CaseRunner:
    """Return the runner of this process's pool.

    Consecutive checks share it, and with it the oracle's results (the same for every implementation, strategy and wrapping) and
    the record of examined adapters.
    """
    return _runner_on(default_pool())


@functools.lru_cache(maxsize=1)
def _runner_on(pool: Pool) -> CaseRunner:
    return CaseRunner(pool)


def load_all(names: Sequence[str]) -> dict[str, Adapter]:
    """Load implementations by name, each once in this process.

    Raises:
        InvalidArgument: No name at all, or one given twice.
        InvalidImplementation: One that cannot be loaded.
    """
    if not names:
        known = ", ".join(registry.names())
        raise InvalidArgument(f"implementations: expected at least one name, got none. Registered: {known}.")
    repeated = sorted({name for name in names if list(names).count(name) > 1})
    if repeated:
        raise InvalidArgument(f"implementations: expected each name once, got {repeated} more than once. Drop one.")
    adapters = {name: registry.adapter_of(name) for name in names}
    for adapter in adapters.values():
        validation.check_claims(adapter)
    return adapters


_EXAMINED: WeakKeyDictionary[CaseRunner, Shared[None]] = WeakKeyDictionary()
"""Adapters that were found fit on a runner's ranks, by reference and world size. A process loads an adapter once, so it cannot
change between two checks. An unfit adapter is examined again.
"""
_EXAMINED_KEPT = 1024


def _examine(
    adapters: Iterable[Adapter], runner: CaseRunner, where: Where, jobs: int, selected: Sequence[Check]
) -> None:
    """Examine each adapter on ranks before its implementation is judged for the first time.

    Raises:
        InvalidImplementation: What the adapter itself does wrong, everything in one message.
    """
    runner.pool.expect(suites.__name__)  # the functions that checks run on ranks are there
    if where.backend != "gloo":
        return  # the examination is about names and values on the CPU; other devices have checks of their own
    size = min(where.sizes(*selected))
    fit = _EXAMINED.setdefault(runner, Shared(_EXAMINED_KEPT))

    def task(adapter: Adapter) -> Callable[[], None]:
        examine = partial(validation.validate, adapter, runner.on_ranks, world_size=size)
        return partial(fit.get, (adapter.reference, size), examine)

    try:
        with closing(runner.side_by_side([task(adapter) for adapter in adapters], jobs)) as examined:
            for _ in examined:
                pass
    except PoolBroken:
        # If a host has vanished and no world starts, each check reports it, and files are still written.
        if not runner.pool.given_up:
            raise


def select_checks(patterns: Sequence[str], *, extended: bool = False) -> list[Check]:
    """Return the checks that the patterns name, in the order of the suites.

    Raises:
        InvalidArgument: A pattern that no check matches; every offender is listed with near names.
    """
    if not patterns:
        return [check for check in CHECKS.values() if extended or check.profile == "default"]
    unknown = [pattern for pattern in patterns if not any(check.matches((pattern,)) for check in CHECKS.values())]
    if unknown:
        known = [*dict.fromkeys(name.partition(".")[0] for name in CHECKS), *CHECKS]
        begun = [name for pattern in unknown for name in known if name.startswith(pattern)][:3]
        matches = (match for pattern in unknown for match in difflib.get_close_matches(pattern, known, n=3))
        near = list(dict.fromkeys((*begun, *matches)))  # the nearest first
        hint = f"Did you mean {', '.join(near)}?" if near else "`fsdp-verify list checks` shows every name."
        raise InvalidArgument(f"checks: expected names or patterns of checks, got {unknown}. {hint}")
    return [check for check in CHECKS.values() if check.matches(patterns)]


def _sizes(world_sizes: Iterable[int]) -> tuple[int, ...]:
    sizes = tuple(world_sizes)
    wrong = [size for size in sizes if not isinstance(size, int) or isinstance(size, bool) or size < 1]
    if wrong or not sizes:
        raise InvalidArgument(f"world_sizes: expected one or more sizes of at least 1, got {world_sizes!r}. Give (2,).")
    return tuple(dict.fromkeys(sizes))


def _place(world_sizes: Iterable[int] | None, backend: str, tensor_parallel: int, selected: Sequence[Check]) -> Where:
    """Return where to judge; refuses a backend that cannot run there, or that computes no real values."""
    where = Where(None if world_sizes is None else _sizes(world_sizes), backend, tensor_parallel)
    sizes = where.sizes(*selected)
    odd = [size for size in sizes if tensor_parallel < 1 or size % tensor_parallel]
    if odd:
        raise InvalidArgument(
            f"tensor_parallel: expected a number that divides every world size, got {tensor_parallel} for {odd}. "
            "Give a multiple of it as world size."
        )
    found = backend_named(backend)
    for size in sizes:
        reason = found.unavailable(size)
        if reason:
            raise BackendUnavailable(f"backend {backend!r}: {reason}")
    if found.single_process:
        raise InvalidArgument(
            f"backend: expected one whose ranks compute real values, got {backend!r}. Give gloo or nccl."
        )
    return where


def environment() -> dict[str, str]:
    """Return date, commit and command of a run, the versions and the machine."""
    from importlib import metadata

    import torch

    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "command": " ".join([_program(), shlex.join(sys.argv[1:])]).rstrip(),
        "fsdp-testing": metadata.version("fsdp-testing"),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processors": str(len(os.sched_getaffinity(0))),
        "executable": sys.executable,
    }


def _program() -> str:
    name, module = Path(sys.argv[0]).name, getattr(sys.modules["__main__"], "__spec__", None)
    return f"python -m {module.parent}" if name == "__main__.py" and module else shlex.quote(name)


def _commit() -> str:
    """Return the commit of the current folder, and whether files differ from it."""
    command = ["git", "describe", "--always", "--dirty= with changes", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5.0, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "none"
