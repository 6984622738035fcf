"""Tries a random sample of mutants, one by one: would fsdp-testing notice a wrong line in the code that it judges?

    python ci/sampled_mutants.py [SUBJECT ...] [--number N] [--first K] [--seed S] [--shard I/N] [--minutes M] [--only TEXT]

SUBJECT is `fsdp_ref`, or `torch-fsdp2` or `torch-fsdp1`: torch's own Python files, of which a copy is imported. mutmut proposes
the changes, `--seed` chooses N of each subject, each is written into the copy, and the harness alone looks at it: every pair of
traits, the checks, also over tensor parallelism, random cases for five minutes; no unit test. Changes of texts are left out.

What executes a mutant is measured once on the sound copy, and only that is asked (ci/mutant_bench.py). A mutant that nothing
executes is not caught. Results are appended to `ci/sampled-mutants.jsonl`, and a later run goes on where this one stopped. What
was caught stays caught while the code of its file stays; what was not is tried again after the harness changed. Exit code: 0 all
survivors are explained (ci/sampled-mutants-explained.toml), 1 some are not or not all were tried, 2 nothing could be tried.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from mutant_bench import FUZZ_SECONDS, Bench, prepared
from mutant_executed import Executed
from mutant_report import STAGES, UNEXECUTED, Fate, explanations, page, report
from mutant_subjects import ROOT, SUBJECTS, Mutant, chosen

from fsdp_testing.cli.options import part

RESULTS = Path(__file__).with_name("sampled-mutants.jsonl")
KEPT = ROOT / "mutants"
PAGE = ROOT / "docs" / "mutants.md"
LIMIT = 1800.0
"""Seconds until a stage counts as hung: several times what it takes, for a busy machine."""


def known_fates(results: Path) -> dict[str, Fate]:
    """The last result of each mutant; a line that was cut off by an interruption is as if never written."""
    fates: dict[str, Fate] = {}
    for line in results.read_text(encoding="utf-8").splitlines() if results.is_file() else ():
        with contextlib.suppress(json.JSONDecodeError):
            fate = Fate(**json.loads(line)["fate"])
            fates[fate.mutant] = fate
    return fates


def ask_again_if_lost(bench: Bench, stage: str, name: str, **options: Any) -> dict[str, Any]:
    """Ask, and once more where the harness itself was lost: that may be the machine's doing, and counts if it repeats.

    A judge that imports the mutant itself (torch's own files) and does not come up is lost, too.
    """

    def ask() -> dict[str, Any]:
        try:
            return bench.judge.ask(stage, name, **options)
        except RuntimeError as error:
            return {"failure": str(error).strip().splitlines()[-1], "hung": False, "unknown": 0, "lost": True}

    answer = ask()
    return ask() if answer["lost"] else answer


def stage_of_mutant(
    bench: Bench, mutant: Mutant, stage: str, asked: dict[str, list[str]]
) -> tuple[dict[str, Any], int]:
    """What one stage gives: the answer that fails, or the last, and how many verdicts are unknown."""
    answer: dict[str, Any] = {"failure": "", "hung": False}
    unknown = 0
    for name, parts in asked.items():
        seconds = FUZZ_SECONDS / len(asked) if stage == "fuzz" else 0.0
        while True:
            with bench.changed({mutant.file: mutant.source}):
                answer = ask_again_if_lost(bench, stage, name, parts=parts, seconds=seconds, limit=LIMIT)
            unknown += answer["unknown"]
            check = answer["failure"].partition(":")[0]
            if check not in parts or bench.passes(name, stage, check):
                break
            parts.remove(check)  # it fails without the change, too: nothing is told by it
            if not parts:
                answer = {"failure": "", "hung": False}
                break
        if answer["failure"]:
            break
    return answer, unknown


def judge_mutant(bench: Bench, executed: Executed, mutant: Mutant, stages: Sequence[str], before: Fate | None) -> Fate:
    """What becomes of a mutant in the stages that have not looked at it."""
    start, names = time.monotonic(), SUBJECTS[bench.subject].names
    done, unknown = list(before.stages if before else ()), before.unknown if before else 0
    spent, is_executed = before.seconds if before else 0.0, executed.holds(mutant)
    caught, failure, hung = "", "", False
    for stage in (stage for stage in (stages if is_executed else ()) if stage not in done):
        done.append(stage)
        answer, more = stage_of_mutant(bench, mutant, stage, executed.asked_of(mutant, names, stage))
        failure, hung, unknown = answer["failure"], answer["hung"], unknown + more
        if failure:
            caught = stage
            break
    seconds = round(spent + time.monotonic() - start, 1)
    return Fate(mutant.identity, caught, failure[:300], done, hung, bench.state, seconds, is_executed, unknown)


def try_all(
    mutants: Sequence[Mutant],
    bench: Bench,
    executed: Executed,
    results: Path,
    stages: Sequence[str],
    over: Callable[[], bool],
) -> dict[str, Fate]:
    """Tries what has no result yet until the time is over; returns all results of this harness."""
    known = {name: fate for name, fate in known_fates(results).items() if fate.stage or fate.harness == bench.state}
    explained = explanations()
    for place, mutant in enumerate(mutants, start=1):
        before = known.get(mutant.identity)
        if over():
            break
        if mutant.name in explained:
            continue  # it was tried before it was explained
        if before is not None and (before.stage or not before.executed or set(stages) <= set(before.stages)):
            continue
        fate = known[mutant.identity] = judge_mutant(bench, executed, mutant, stages, before)
        result = {"fate": asdict(fate), "file": mutant.place, "line": mutant.first, "diff": mutant.diff}
        with results.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(result) + "\n")
        end = f"caught by {fate.stage}{' (hung)' if fate.hung else ''}: {fate.account}"
        end = end if fate.stage else "not caught so far" if fate.executed else UNEXECUTED
        print(f"{place}/{len(mutants)}, {fate.seconds} s: {mutant.place}:{mutant.first} {mutant.function}")
        print("\n".join(f"    {line}" for line in (*mutant.diff, end)), flush=True)
    return known


def main() -> int:
    """Choose, try, tell; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subjects", nargs="*", default=["fsdp_ref"], metavar="SUBJECT", help=", ".join(SUBJECTS))
    parser.add_argument("--number", type=int, default=20, help="mutants of each subject (default: 20)")
    parser.add_argument("--first", type=int, help="of these only the first so many, which are a random sample, too")
    parser.add_argument("--seed", type=int, default=0, help="which (default: 0)")
    parser.add_argument("--shard", type=part, default=(1, 1), metavar="I/N", help="the I-th of N parts of them")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no mutant after so long")
    parser.add_argument("--only", default="", help="only mutants whose file and function contain this")
    parser.add_argument("--stages", default=",".join(STAGES), help="who looks at them (default: all)")
    parser.add_argument("--report", action="store_true", help="only tell what is known")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where results are kept (default: in ci/)")
    parser.add_argument("--page", action="store_true", help="write docs/mutants.md of what is known")
    options = parser.parse_args()
    until, stages = time.monotonic() + 60 * options.minutes, options.stages.split(",")
    samples: dict[str, list[Mutant]] = {}
    fates: dict[str, Fate] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for subject in options.subjects:
            sample = chosen(subject, options.number, options.seed, options.only)
            mine = sample[: options.first][options.shard[0] - 1 :: options.shard[1]]
            samples[subject] = mine
            if options.report or options.page:
                fates |= known_fates(options.results)
                continue
            try:
                with prepared(Path(scratch).resolve(), subject, KEPT) as bench:
                    executed = bench.executed(sample, stages)
                    fates |= try_all(mine, bench, executed, options.results, stages, lambda: time.monotonic() > until)
            except RuntimeError as failure:
                print(f"nothing more was tried: {failure}")
                return 2
            except KeyboardInterrupt:
                fates |= known_fates(options.results)
                break
    if options.page:
        versions = f"torch {metadata.version('torch')}, mutmut {metadata.version('mutmut')}"
        PAGE.write_text(page(samples, fates, versions), encoding="utf-8")
    return report([mutant for sample in samples.values() for mutant in sample], fates, stages)


if __name__ == "__main__":
    sys.exit(main())
