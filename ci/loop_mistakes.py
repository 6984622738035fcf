"""Writes into docs/training-details.md which mistakes `fsdp-verify train` names, and that right scripts pass.

    python ci/loop_mistakes.py --state FILE [--runs 10] [--only PATTERN...]

Right scripts are those of examples/training and, for frameworks that are installed, of tests/fsdp_testing/train. Each
runs `--runs` times on 1 and 2 ranks. Mistakes are edits of such scripts, one at a time (ci/loop-mistakes.toml), and run once.
A mistake counts as named if the verdict is FAIL and says the expected cause. What has run is kept in FILE, one JSON document
a line, and not run again while the script and the code that judges it are the same. With `--only`, cases run whose name or
script has a PATTERN in it, and the page stays as it is. Exit code 1: a false alarm, or a mistake that is not named.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import importlib.util
import json
import os
import re
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fsdp_testing.cases.records import Verdict
from fsdp_testing.train.script import Launch, examine

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "training-details.md"
BEGIN, END = "<!-- begin: made by ci/loop_mistakes.py -->\n", "<!-- end -->\n"
STYLES = ROOT / "examples" / "training"
FRAMEWORKS = ROOT / "tests" / "fsdp_testing" / "train"
PACKAGES = {
    "with_accelerate.py": "accelerate",
    "with_trainer.py": "transformers",
    "with_fabric.py": "lightning",
    "with_lightning.py": "lightning",
}
JUDGES = ROOT / "fsdp_testing" / "train"
STEPS = 4


@dataclass(frozen=True, slots=True)
class Case:
    """A script to judge.

    Attributes:
        name: The mistake, or the script where it is right.
        script: Name of the file that it is, or is made of.
        text: Its source.
        cause: What the verdict has to say; empty of a right script.
        steps: Optimizer steps that are compared.
        resume_at: Step before which it is stopped to be resumed; never with 0.
    """

    name: str
    script: str
    text: str
    cause: str = ""
    steps: int = STEPS
    resume_at: int = 0

    def digest(self) -> str:
        """Return what changes when the script, or the code that judges it, does."""
        sources = sorted(JUDGES.rglob("*.py"))
        parts = [repr(asdict(self)), *(path.read_text(encoding="utf-8") for path in sources)]
        return hashlib.blake2b("".join(parts).encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class Result:
    """One run of a case."""

    name: str
    digest: str
    verdict: str
    said: str


def right_scripts() -> Iterator[Case]:
    """Yield the right scripts of each style; of frameworks those that are installed."""
    for path in sorted(STYLES.glob("*.py")):
        yield Case(path.name, path.name, path.read_text(encoding="utf-8"))
    for name, package in PACKAGES.items():
        if importlib.util.find_spec(package):
            yield Case(name, name, (FRAMEWORKS / name).read_text(encoding="utf-8"))


def mistakes() -> Iterator[Case]:
    """Yield each mistake whose framework is installed, as the script with its edits.

    Raises:
        SystemExit: A text that is to be replaced is not there exactly once.
    """
    for entry in tomllib.loads(Path(__file__).with_name("loop-mistakes.toml").read_text(encoding="utf-8"))["mistake"]:
        if entry["script"] in PACKAGES and not importlib.util.find_spec(PACKAGES[entry["script"]]):
            continue
        folder = FRAMEWORKS if entry["script"] in PACKAGES else STYLES
        text = (folder / entry["script"]).read_text(encoding="utf-8")
        for old, new in entry["edits"]:
            if text.count(old) != 1:
                sys.exit(f"{entry['what']}: {entry['script']} has {text.count(old)} times, not once: {old!r}")
            text = text.replace(old, new)
        yield Case(
            entry["what"],
            entry["script"],
            text,
            entry["cause"],
            entry.get("steps", STEPS),
            entry.get("resume_at", 0),
        )


def run(case: Case) -> Result:
    """Judge a case on 1 and 2 ranks, in processes that are kept for the next one, and an empty folder."""
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / case.script).write_text(case.text, encoding="utf-8")
        os.chdir(folder)
        try:
            report = examine(Launch(case.script, steps=case.steps, resume_at=case.resume_at, isolation="warm"), (1, 2))
        finally:
            os.chdir(here)
    worst = next(one for one in report.judgements if one.verdict is report.verdict)
    return Result(case.name, case.digest(), report.verdict.value, worst.sentence)


def is_named(case: Case, result: Result) -> bool:
    """Whether a mistake failed with the expected cause."""
    return result.verdict == Verdict.FAIL.value and bool(re.search(case.cause, result.said, re.DOTALL))


def kept(state: Path) -> list[Result]:
    """Return what earlier runs left."""
    lines = state.read_text(encoding="utf-8").splitlines() if state.exists() else []
    return [Result(**json.loads(line)) for line in lines]


def run_all(cases: Sequence[Case], times: int, state: Path) -> dict[str, list[Result]]:
    """Run what is not known yet, each case once before any runs again; return the results by the name of the case."""
    known = kept(state)
    digests = {case.name: case.digest() for case in cases}
    found = {name: [one for one in known if (one.name, one.digest) == (name, d)] for name, d in digests.items()}
    for turn in range(times):
        for case in cases:
            if len(found[case.name]) > (0 if case.cause else turn):
                continue
            result = run(case)
            found[case.name].append(result)
            with state.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(result)) + "\n")
            print(f"{case.script}: {case.name}: {result.verdict}: {result.said}", flush=True)
    return found


def table(cases: Sequence[Case], found: dict[str, list[Result]]) -> str:
    """Return what the page says: how many are named, and each that is not."""
    right, wrong = [case for case in cases if not case.cause], [case for case in cases if case.cause]
    passed = {case.name: sum(one.verdict == Verdict.PASS.value for one in found[case.name]) for case in right}
    named = [case for case in wrong if is_named(case, found[case.name][0])]
    count = sum(len(found[case.name]) for case in right)
    summary = (
        f"{len(named)} of {len(wrong)} mistakes planted into right scripts are named with the planted cause. "
        f"{sum(passed.values())} of {count} runs of {len(right)} right scripts pass. All run unmodified on 1 and 2 CPU ranks. "
        "Not named:"
    )
    lines = [
        summary,
        "",
        *(f"- {c.name} (`{c.script}`): {_said(c, found[c.name][0])}" for c in wrong if c not in named),
        "",
    ]
    return "\n".join(lines)


def _said(case: Case, result: Result) -> str:
    """Return what was said in place of the cause."""
    cause = result.said.partition("Cause: ")[2] or result.said
    verdict = "pass" if result.verdict == "pass" else "another cause"
    first = re.split(r"\. (?=[A-Z])|; |: (?=the )| \(|, first |, so that ", cause)[0]
    return f"{verdict}: {first.strip().rstrip('.')}"


def main() -> int:
    """Run, print, and write the page; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, required=True, metavar="FILE", help="where results are kept")
    parser.add_argument("--runs", type=int, default=10, help="runs of each right script (default: 10)")
    parser.add_argument("--only", nargs="*", default=[], metavar="PATTERN", help="judge these, and leave the page")
    chosen = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    cases = [*mistakes(), *right_scripts()]
    if chosen.only:
        cases = [c for c in cases if any(fnmatch.fnmatch(f"{c.script}: {c.name}", f"*{p}*") for p in chosen.only)]
    found = run_all(cases, chosen.runs, chosen.state)
    text = table(cases, found)
    if not chosen.only:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE.write_text(before + BEGIN + text + END + rest.partition(END)[2], encoding="utf-8")
    print(text)
    alarms = [c.name for c in cases if not c.cause and any(one.verdict != "pass" for one in found[c.name])]
    missed = [c.name for c in cases if c.cause and not is_named(c, found[c.name][0])]
    print(*[f"not named: {name}" for name in missed], *[f"does not pass: {name}" for name in alarms], sep="\n")
    return 1 if alarms or missed else 0


if __name__ == "__main__":
    sys.exit(main())
