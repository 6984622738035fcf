"""`fsdp-verify replay FILE`: run a recorded case again, on new processes, and say whether its bits are the same."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fsdp_testing.cli.options import Command, Subparsers, add_timeout, declare, path_of
from fsdp_testing.cli.outputs import present
from fsdp_testing.errors import InvalidArgument

if TYPE_CHECKING:
    from fsdp_testing.adapters.adapter import Adapter
    from fsdp_testing.checks.findings.rerun import Judge, Recorded
    from fsdp_testing.judging.case_runner import JudgedCase
    from fsdp_testing.report.terminal import Output

DESCRIPTION = """\
Run the case in FILE (a case, a finding of `fuzz`, or the failures of a JSON report) twice, each time on new processes,
judge it, and compare the bits of both runs. A case that fails once and passes once is unknown. What fails is given its
cause, and the known failure that it is, as far as they are known.
"""
EXAMPLE = "fsdp-verify replay .fsdp-fuzz/NAME/found/CASE/finding.json"
EPILOG = "exit codes: 0 it passes; 1 it fails; 2 the file or the name is bad; 3 no verdict."
PASSED, FAILS, UNKNOWN = "passed", "fails", "unknown"
CODES = {PASSED: 0, FAILS: 1, UNKNOWN: 3}
_WORDS = {"pass": PASSED, "fail": FAILS}


def add(commands: Subparsers[Command]) -> Command:
    """Declare the command."""
    command = declare(commands, "replay", "run a recorded case again", DESCRIPTION, example=EXAMPLE, epilog=EPILOG)
    command.add_argument("file", type=path_of, metavar="FILE", help="JSON")
    command.add_argument("--implementation", metavar="NAME", help="run it on this implementation instead")
    command.add_argument("--once", action="store_true", help="run it once instead of twice")
    add_timeout(command, 30.0)
    return command


def execute(options: argparse.Namespace) -> int:
    """Replay every case in the file; the worst outcome is the exit code."""
    from fsdp_testing.checks.findings.rerun import read_recorded
    from fsdp_testing.report.sheet import Sheet, listed, numbered
    from fsdp_testing.report.terminal import open_console

    console = open_console()
    words = Counter(_replay(console, recorded, options) for recorded in read_recorded(options.file))
    code = next(CODES[word] for word in (FAILS, UNKNOWN, PASSED) if words[word])
    counts = listed(f"{numbered(words[word], 'case')} {word}" for word in CODES if words[word])
    return present(Sheet(str(options.file), code, counts), console, {}, {})


def _replay(console: Output, recorded: Recorded, options: argparse.Namespace) -> str:
    from fsdp_testing.adapters import registry
    from fsdp_testing.checks.findings.rerun import check_claims, replay
    from fsdp_testing.ranks.pool import Pool

    name = options.implementation or recorded.implementation
    if not name:
        raise InvalidArgument(
            f"{options.file}: expected a file that names an implementation, got a case alone. "
            "Give --implementation NAME."
        )
    adapter = registry.load(name)
    check_claims(recorded.case, adapter)
    known, check = _judge_of(recorded.check)
    runs = []
    for _ in range(1 if options.once else 2):
        pool = Pool()
        try:
            runs.append(replay(pool, adapter, recorded.case, options.timeout, check))
        finally:
            pool.close()
    word, lines = _account(runs)
    if word == PASSED and not known:
        word = UNKNOWN
        lines.append(
            f"  {recorded.check}, which the case failed, is not a check of this version; it may have judged more than the numbers"
        )
    if word == FAILS and check is None:
        lines += _explained(adapter, runs[0][0], options.timeout)
    console.say(f"case {recorded.case.identity} on {name}: {word}")
    for line in lines:
        console.say(line)
    return word


def _explained(adapter: Adapter, judged: JudgedCase, timeout: float) -> list[str]:
    """Return the cause of wrong numbers and the known failure that the case is, as far as they are known."""
    from fsdp_testing.cases.drawing import legal_case, needs_of_case
    from fsdp_testing.checks.findings.known import shipped_known
    from fsdp_testing.explain.inquiry import WRONG_NUMBERS
    from fsdp_testing.judging.case_runner import CaseRunner
    from fsdp_testing.ranks.pool import Pool
    from fsdp_testing.search.investigation import Investigator, explained

    if judged.signature is None:
        return []
    pool = Pool()
    try:
        runner = CaseRunner(pool, timeout=timeout)
        wrong = judged.signature.kind in WRONG_NUMBERS
        cause = judged.judgement.cause or (explained(runner, adapter.name, judged.case) if wrong else "")
        fair = lambda case: needs_of_case(case) - {"nested_wrapping"} <= adapter.capabilities
        investigator = Investigator(adapter.name, legal_case, fair, seconds=0.0)
        rule = investigator.known_as(runner, judged, shipped_known(adapter.name), cause)
    finally:
        pool.close()
    lines = [f"  cause: {cause}"] if cause else []
    return lines + ([] if rule is None else [f"  known failure: {rule.reason} {rule.page or rule.issue}"])


def _judge_of(name: str) -> tuple[bool, Judge | None]:
    """Return whether this version has a check, and how it judges a case, if it judges more than the numbers."""
    from fsdp_testing.checks.suites import CHECKS
    from fsdp_testing.judging.case_runner import ORDINARY

    check = CHECKS.get(name)
    more = check is not None and (check.judge is not None or check.mode != ORDINARY)
    return check is not None or not name, check.judged if check is not None and more else None


def _account(runs: Sequence[tuple[JudgedCase, str]]) -> tuple[str, list[str]]:
    """Return the word for the result of the runs, and the details."""
    words = [_WORDS.get(judged.verdict.value, UNKNOWN) for judged, _ in runs]
    lines = []
    for (judged, _), each in list(zip(runs, words))[: None if len(set(words)) > 1 else 1]:
        if each != PASSED:
            lines.append(f"  {judged.signature or ''} {judged.judgement.why}".rstrip())
        lines += [judged.judgement.account] if judged.judgement.account else []
    word = words[0]
    if len(runs) == 2:
        digest, other = (digest for _, digest in runs)
        how = f"the same bits on restarted processes ({digest or 'none were reported'})"
        differ = f"different bits on restarted processes: {digest or 'none'} and {other or 'none'}"
        lines.append(f"  {how if digest == other else differ}")
        if len(set(words)) > 1:
            lines.append(f"  different results: first {words[0]}, then {words[1]}")
        if len(set(words)) > 1 or (word == PASSED and digest != other):
            word = UNKNOWN
    return word, lines
