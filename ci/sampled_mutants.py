"""Would anybody notice a wrong line in the code that moves and frees memory? A random sample of mutants, tried one by one.

    python ci/sampled_mutants.py [FOLDER ...] [--number N] [--seed S] [--minutes M] [--only TEXT] [--results FILE]

The layout is tried line by line (ci/mutants.py); its tests take seconds and need no ranks. What runs on ranks is tried on
a sample: mutmut proposes the changes, `--seed` chooses N of each folder, each is written into a copy of the repository and
meets the tests that execute the changed line (ci/tests_by_line.py), the folder's own first, until one fails: for a short
while, which is enough for most, then all of them. Those that no test notices meet the conformance suite, on both paths of
the reference. Changes of texts are left out.

Each result is appended to FILE, and a later run goes on where this one stopped: what was noticed stays noticed while the
source stays; what was not is tried again after the tests changed. Exit code: 0 all survivors are explained
(ci/sampled-mutants-explained.toml), 1 some are not or not all were tried, 2 nothing could be tried.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import hashlib
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import libcst
from mutmut.mutation.file_mutation import Mutation, create_mutations, deep_replace
from tests_by_line import PYTEST, TestsByLine, environment, loaded, measured, saved, statement_lines

ROOT = Path(__file__).resolve().parents[1]
EXPLAINED = Path(__file__).with_name("sampled-mutants-explained.toml")
RESULTS = ROOT / "mutants" / "sampled.jsonl"
FOLDERS = ("fsdp_ref/handle", "fsdp_ref/runtime", "fsdp_ref/comm", "fsdp_ref/storage", "fsdp_ref/training")
STAGES = ("glance", "tests", "conformance")
GLANCE_SECONDS = 90
TEST_SECONDS = 180
"""Until one test counts as hung: sixty times what the slowest takes. Ranks have a deadline of their own."""
SECONDS = 3600
"""Until a stage counts as hung: ten times what it takes, so that a busy machine makes no mutant look noticed."""
_VERIFY = ("-c", "from fsdp_testing.cli.main import main; raise SystemExit(main())", "run", "--explain", "0")
_WHERE = """
import fsdp_ref, fsdp_testing
def place():
    import fsdp_ref.comm.collectives as imported
    return imported.__file__
if __name__ == "__main__":
    print(fsdp_testing.__file__, fsdp_ref.__file__, *fsdp_testing.run_ranks(place, size=2), sep="\\n")
"""
_HUNG = re.compile(r"\bhung\b|not ended after|^Timeout \(", re.MULTILINE)
_NOT_ENDED = 124
_HANGS_END = ("-o", f"faulthandler_timeout={TEST_SECONDS}", "-o", "faulthandler_exit_on_timeout=true")
_NOTHING_RAN = (4, 5)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one file.

    Attributes:
        file: Path in the repository.
        function: Name of the function or method that is changed.
        source: The whole file, changed.
        diff: The change, as lines of a unified diff.
        first: First line that is changed, in the file as it is.
        last: Last one.
    """

    file: str
    function: str
    source: str
    diff: tuple[str, ...]
    first: int
    last: int

    @property
    def folder(self) -> str:
        """Where it is, for counting."""
        return Path(self.file).parent.as_posix()

    def text(self, sign: str) -> str:
        """Lines that go (`-`) or come (`+`), in one line."""
        return " ".join(line[1:].strip() for line in self.diff if line[0] == sign)

    @property
    def name(self) -> tuple[str, str, str, str]:
        """How ci/sampled-mutants-explained.toml knows it: no line numbers, which shift."""
        return self.file, self.function, self.text("-"), self.text("+")

    @property
    def identity(self) -> str:
        """The changed file as a whole, so that a result holds for this source alone."""
        return hashlib.sha256(f"{self.file}\n{self.source}".encode()).hexdigest()[:24]


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of a mutant.

    Attributes:
        mutant: Its identity.
        stage: What failed first; empty if nothing did.
        account: The failing test or check, or how many tests execute the line.
        asked: Stages that looked at it and found nothing, or the last one something.
        hung: It was noticed because ranks, or all of it, did not end.
        tests: State of the tests that looked at it.
        seconds: How long that took.
    """

    mutant: str
    stage: str
    account: str
    asked: Sequence[str]
    hung: bool
    tests: str
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """A change that mutmut proposes, not written out yet: that takes long, and few are chosen."""

    file: str
    function: str
    module: libcst.Module
    mutation: Mutation

    def written_out(self) -> Mutant:
        """The mutant that it makes."""
        changed = deep_replace(self.module, self.mutation.original_node, self.mutation.mutated_node)
        source = changed.code if isinstance(changed, libcst.Module) else ""
        lines = list(difflib.unified_diff(self.module.code.splitlines(), source.splitlines(), n=0))[2:]
        spans = re.findall(r"^@@ -(\d+)(?:,(\d+))?", "\n".join(lines), flags=re.MULTILINE)
        first, (start, count) = int(spans[0][0]), spans[-1]
        last = int(start) + max(1, int(count or 1)) - 1
        return Mutant(self.file, self.function, source, tuple(line for line in lines if line[0] in "+-"), first, last)


def proposals(file: Path) -> Iterator[Proposal]:
    """Every change that mutmut proposes inside functions, but for changes of texts."""
    name = file.relative_to(ROOT).as_posix()
    module, mutations, _, _ = create_mutations(name, file.read_text(encoding="utf-8"))
    for mutation in mutations:
        function = mutation.contained_by_top_level_function
        text = (libcst.SimpleString, libcst.FormattedString, libcst.ConcatenatedString)
        if isinstance(function, libcst.FunctionDef) and not isinstance(mutation.original_node, text):
            yield Proposal(name, function.name.value, module, mutation)


def chosen(folders: Sequence[str], number: int, seed: int, only: str) -> list[Mutant]:
    """`number` mutants of each folder in turn, the same for the same seed and source; a part of them is a sample too."""
    drawn: list[list[Proposal]] = []
    for folder in folders:
        files = sorted(path for path in (ROOT / folder).rglob("*.py") if path.name != "__init__.py")
        found = [each for file in files for each in proposals(file) if only in f"{each.file} {each.function}"]
        drawn.append(random.Random(f"{seed} {folder}").sample(found, min(number, len(found))))
        print(f"{folder}: {len(found)} mutants, {len(drawn[-1])} of them chosen", flush=True)
    return [each[turn].written_out() for turn in range(number) for each in drawn if turn < len(each)]


@dataclass(frozen=True, slots=True)
class Bench:
    """Where mutants are tried.

    Attributes:
        tree: A copy of the repository; only this is imported, by the controller and by ranks.
        state: Stands for the tests in it.
        by_line: Which tests execute which line.
    """

    tree: Path
    state: str
    by_line: TestsByLine

    def fate(self, mutant: Mutant, stage: str, before: Fate | None) -> Fate:
        """Writes the mutant into the tree, lets a stage look at it, and takes it back."""
        place = self.tree / mutant.file
        original = place.read_text(encoding="utf-8")
        tests = self.by_line.executing(mutant.file, statement_lines(original, mutant.first, mutant.last))
        start = time.monotonic()
        place.write_text(mutant.source, encoding="utf-8")
        try:
            if stage == "conformance":
                code, output = run(self.tree, *_VERIFY, "fsdp_ref-composable", "fsdp_ref-wrapper")
            else:
                code, output = asked_tests(self.tree, mutant, tests, GLANCE_SECONDS if stage == "glance" else SECONDS)
        finally:
            place.write_text(original, encoding="utf-8")
        asked, seconds = ((), 0.0) if before is None else (before.asked, before.seconds)
        if stage == "glance":  # what ended in time needs no second look
            stage, code = (stage, 0) if code == _NOT_ENDED else ("tests", code)
        account = _account(output) if code else f"{len(tests)} test functions execute the line"
        return Fate(
            mutant.identity,
            stage if code else "",
            account,
            (*asked, stage),
            bool(code and _HUNG.search(output)),
            self.state,
            round(seconds + time.monotonic() - start, 1),
        )


def asked_tests(tree: Path, mutant: Mutant, tests: Sequence[str], seconds: float) -> tuple[int, str]:
    """Exit code and output of the tests; 0 if there are none.

    Raises:
        RuntimeError: pytest ran none of them, for another reason than the mutant.
    """
    code, output = run(tree, *PYTEST, *_HANGS_END, *tests, seconds=seconds) if tests else (0, "")
    if code in _NOTHING_RAN:
        module = mutant.file.removesuffix(".py").replace("/", ".")
        if not run(tree, "-c", f"import fsdp_ref, {module}")[0]:
            raise RuntimeError(f"{tests}: expected tests that run, got exit code {code}\n{output[-2000:]}")
    return code, output


def run(tree: Path, *arguments: str, seconds: float = SECONDS) -> tuple[int, str]:
    """Python on the tree: exit code and output; 124 for what does not end, which is ended with all that it started."""
    command, said = [sys.executable, *arguments], subprocess.PIPE
    with subprocess.Popen(
        command,
        cwd=tree,
        env=environment(tree),
        text=True,
        start_new_session=True,
        stdout=said,
        stderr=subprocess.STDOUT,
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        except BaseException as failure:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(failure, subprocess.TimeoutExpired):
                raise
            return _NOT_ENDED, f"not ended after {seconds} s"
        return process.returncode, output


def _account(output: str) -> str:
    said = re.findall(r"^(?:FAILED|ERROR) (.*)$", output, flags=re.MULTILINE)
    refuted = re.findall(r"^\s+(\S+) .*\b(?:FAIL|unknown)\b", output, flags=re.MULTILINE)
    return (said or refuted or output.strip().splitlines() or [""])[0][:200]


def copied(home: Path) -> Path:
    """A copy of what git knows of this tree.

    Raises:
        RuntimeError: Something else than the copy would be imported.
    """
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    for name in files:
        if (ROOT / name).is_file():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, home / name)
    asking = home / "where.py"
    asking.write_text(_WHERE, encoding="utf-8")
    code, output = run(home, str(asking))
    if code or len(output.split()) != 4 or not all(Path(each).is_relative_to(home) for each in output.split()):
        raise RuntimeError(f"imports: expected those of {home} here and on ranks, got\n{output}")
    return home


def prepared(home: Path, results: Path) -> Bench:
    """A copy of the tree, proved to be sound and to be what is imported."""
    tree = copied(home / "tree")
    files = sorted(path for top in ("fsdp_ref", "fsdp_testing", "tests") for path in (tree / top).rglob("*.py"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:24]
    kept = results.with_name("tests-by-line.json")
    by_line = loaded(kept, digest)
    if by_line is None:
        print("measuring which tests execute which line, and that all pass (minutes)", flush=True)
        data = home / "coverage"
        data.mkdir()
        by_line = measured(tree, data, environment(tree))
        code, output = run(tree, *_VERIFY, "fsdp_ref-composable", "fsdp_ref-wrapper")
        if code:
            raise RuntimeError(f"conformance: expected success without any change, got\n{output[-3000:]}")
        saved(by_line, kept, digest)
    return Bench(tree, digest, by_line)


def known_fates(results: Path) -> dict[str, Fate]:
    """The last result of each mutant; a line that was cut off by an interruption is as if never written."""
    found: dict[str, Fate] = {}
    for line in results.read_text(encoding="utf-8").splitlines() if results.is_file() else ():
        with contextlib.suppress(json.JSONDecodeError):
            fate = Fate(**json.loads(line)["fate"])
            found[fate.mutant] = fate
    return found


def attempted(mutants: Sequence[Mutant], bench: Bench, results: Path, until: float) -> dict[str, Fate]:
    """Tries what has no result yet, stage by stage, until the time has passed; returns all results of these tests."""
    known = {name: fate for name, fate in known_fates(results).items() if fate.stage or fate.tests == bench.state}
    for stage in STAGES:
        for number, mutant in enumerate(mutants, start=1):
            before = known.get(mutant.identity)
            done = before is not None and (before.stage or set(STAGES[STAGES.index(stage) :]) & set(before.asked))
            if done or time.monotonic() > until or (before is None and stage != STAGES[0]):
                continue
            fate = known[mutant.identity] = bench.fate(mutant, stage, before)
            said = {"fate": asdict(fate), "file": mutant.file, "line": mutant.first, "diff": mutant.diff}
            with results.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(said) + "\n")
            end = (
                f"{fate.stage}{' (hung)' if fate.hung else ''}: {fate.account}" if fate.stage else "not noticed so far"
            )
            print(f"{number}/{len(mutants)} {stage}, {fate.seconds} s: {mutant.file}:{mutant.first} {mutant.function}")
            print("\n".join(f"    {line}" for line in (*mutant.diff, end)), flush=True)
    return known


def explanations() -> dict[tuple[str, str, str, str], str]:
    """Why each known survivor changes nothing that anybody could notice."""
    entries = tomllib.loads(EXPLAINED.read_text(encoding="utf-8")).get("survivor", [])
    return {(each["file"], each["function"], each["removed"], each["added"]): each["why"] for each in entries}


def wilson(caught: int, judged: int) -> tuple[float, float]:
    """Wilson's interval for a share, at 95 %."""
    if not judged:
        return 0.0, 1.0
    z, share = 1.959964, caught / judged
    middle = share + z * z / (2 * judged)
    spread = z * math.sqrt(share * (1 - share) / judged + z * z / (4 * judged * judged))
    return max(0.0, (middle - spread) / (1 + z * z / judged)), min(1.0, (middle + spread) / (1 + z * z / judged))


def report(mutants: Sequence[Mutant], fates: Mapping[str, Fate]) -> int:
    """Tells the share that was noticed, by folder, and every survivor; returns the exit code."""
    known = explanations()
    tried = [mutant for mutant in mutants if mutant.identity in fates]
    left = [mutant for mutant in tried if not fates[mutant.identity].stage]
    equivalent = [mutant for mutant in left if mutant.name in known]
    print(f"\n{'':18} tried  tests  conformance  (hung)  not noticed  equivalent  noticed of the others, 95 % interval")
    for folder in (*dict.fromkeys(mutant.folder for mutant in tried), ""):
        here = [fates[mutant.identity] for mutant in tried if folder in ("", mutant.folder)]
        by = {stage: sum(fate.stage == stage for fate in here) for stage in ("tests", "conformance", "")}
        same = sum(folder in ("", mutant.folder) for mutant in equivalent)
        caught, judged = len(here) - by[""], len(here) - same
        low, high = wilson(caught, judged)
        print(
            f"{folder or 'all':18} {len(here):5} {by['tests']:6} {by['conformance']:12} {sum(f.hung for f in here):7}"
            f" {by['']:12} {same:11}  {caught} of {judged}: {caught / max(1, judged):.1%} ({low:.1%} to {high:.1%})"
        )
    for mutant in left:
        why = known.get(mutant.name)
        print(f"\n{'equivalent' if why else 'NOT NOTICED'}: {mutant.file}:{mutant.first} {mutant.function}")
        print("\n".join(f"    {line}" for line in mutant.diff))
        fate = fates[mutant.identity]
        asked = " and ".join(fate.asked)
        print(f"    {why or f'{fate.account}; asked: {asked}'}")
    half = [mutant for mutant in left if STAGES[-1] not in fates[mutant.identity].asked]
    waiting = len(mutants) - len(tried) + len(half)
    if waiting:
        print(f"\n{waiting} of {len(mutants)} were not tried, or not by {STAGES[-1]}; run again to go on")
    return 0 if len(left) == len(equivalent) and not waiting else 1


def main() -> int:
    """Choose, try, tell; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", default=FOLDERS, metavar="FOLDER", help=f"default: {' '.join(FOLDERS)}")
    parser.add_argument("--number", type=int, default=20, help="mutants of each folder (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="which (default: 0)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no mutant after so long")
    parser.add_argument("--only", default="", help="only mutants whose file and function contain this")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where results are kept (default: mutants/)")
    asked = parser.parse_args()
    until = time.monotonic() + 60 * asked.minutes
    mutants = chosen(asked.folders, asked.number, asked.seed, asked.only)
    asked.results.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            fates = attempted(mutants, prepared(Path(scratch).resolve(), asked.results), asked.results, until)
        except RuntimeError as failure:
            print(f"nothing more was tried: {failure}")
            return 2
        except KeyboardInterrupt:
            fates = known_fates(asked.results)
    return report(mutants, fates)


if __name__ == "__main__":
    sys.exit(main())
