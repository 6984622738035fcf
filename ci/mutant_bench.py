"""A copy of the tree in which ci/sampled_mutants.py tries its mutants, and which checks and cases execute which of them.

Before mutants are tried, the sound copy is asked everything once, with a mark before each statement that a mutant changes. A
mutant then meets only the checks and cases that come to its statement: the others would give what they gave. What checks execute
is kept beside this file when the code changes, for measuring it takes half an hour: then new checks alone are measured. So an
older check that has come to execute more is not asked of a mutant, and one that is caught meets the check that caught it without
its change, too. A mutant that is new meets what executes the other mutants of its function, else of its file.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import math
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from mutant_executed import KINDS, OF_CHECKS, Executed
from mutant_subjects import ROOT, SUBJECTS, Mutant, code_of, statement_at

AT_ONCE = 60
"""Checks that are measured before what they execute is kept."""
JUDGE = Path(__file__).with_name("mutant_judge.py")
MARKS = "marks"
FINDER = "sitecustomize.py"
START_SECONDS = 600.0
"""Until a judge that does not come up counts as hung."""
FUZZ_SECONDS = 300.0
"""How long a mutant is fuzzed, and first the sound copy with the same seed: of all implementations of a subject together."""
_WHERE = """
import importlib, fsdp_testing
def place():
    return importlib.import_module({module!r}).__file__
if __name__ == "__main__":
    print(fsdp_testing.__file__, place(), *fsdp_testing.run_ranks(place, size=2), sep="\\n")
"""
_COPY_OF_TORCH = """
import importlib.abc, importlib.util, sys
class OfTheCopy(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == {package!r}:
            folder = {folder!r}
            return importlib.util.spec_from_file_location(name, folder + "/__init__.py", submodule_search_locations=[folder])
sys.meta_path.insert(0, OfTheCopy())
"""
"""What every interpreter on the tree runs first (`sitecustomize`): the copied package is found in the copy."""
_MARKS = """
import mmap
with open({file!r}, "r+b") as stream:
    seen = mmap.mmap(stream.fileno(), 0)
"""


class Judge:
    """The process that judges what lies in a tree (ci/mutant_judge.py), started when it is asked.

    Args:
        tree: Where it runs.
        package: Whose code changes.
        folder: What it keeps: the cases of `pairs`, the state of a campaign.
    """

    def __init__(self, tree: Path, package: str, folder: Path) -> None:
        self._command = [sys.executable, str(JUDGE), str(folder), package]
        self._tree = tree
        self._process: subprocess.Popen[str] | None = None
        self._serves_many = False

    def ask(self, kind: str, name: str, **options: Any) -> dict[str, Any]:
        """Ask one request (`mutant_judge.Request`) and return its answer (`mutant_judge.Answer`).

        Raises:
            RuntimeError: The process ended in place of an answer.
        """
        if self._process is None:
            self._process = subprocess.Popen(
                self._command,
                cwd=self._tree,
                env=environment(self._tree),
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=(self._tree.parent / "judge.log").open("w"),
            )
            self._serves_many = self._line(self._process.stdout, START_SECONDS)["serves many"]
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(json.dumps({"kind": kind, "name": name, **options}) + "\n")
        stdin.flush()
        answer = self._line(self._process.stdout, math.inf)
        if not self._serves_many:
            self.close()
        return answer

    def _line(self, stdout: IO[str] | None, seconds: float) -> dict[str, Any]:
        """The next line; for a request the judge itself sees to the time."""
        assert stdout is not None
        in_time = math.isinf(seconds) or select.select([stdout], [], [], seconds)[0]
        text = stdout.readline() if in_time else ""
        if not text:
            self._end()
            log = (self._tree.parent / "judge.log").read_text(encoding="utf-8", errors="replace")
            raise RuntimeError(f"the judging process: expected an answer, it ended with\n{log[-3000:]}")
        answer: dict[str, Any] = json.loads(text)
        return answer

    def close(self) -> None:
        """End it with all that it started."""
        if self._process is not None:
            self._process.communicate()  # closes its standard input, which ends it
            self._process = None

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self.close()


@dataclass(frozen=True, slots=True)
class Bench:
    """Where mutants of a subject are tried.

    Attributes:
        subject: Its name.
        tree: A copy of the repository; only this is imported, by the controller and by ranks.
        package: The copy of the package that is changed.
        state: Stands for all code and lists in the tree.
        folder: What is kept from one run to the next for this state.
        of_checks: File of what checks execute, which is kept for all states.
        judge: Judges what lies in the tree.
        passed: Name, kind and check of what the sound copy passed here.
    """

    subject: str
    tree: Path
    package: Path
    state: str
    folder: Path
    of_checks: Path
    judge: Judge
    passed: set[tuple[str, str, str]] = field(default_factory=set)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.judge.close()

    @contextlib.contextmanager
    def changed(self, sources: Mapping[str, str]) -> Iterator[None]:
        """Have files of the package changed while the block lasts."""
        before = {name: (self.package / name).read_text(encoding="utf-8") for name in sources}
        try:
            for name, source in sources.items():
                (self.package / name).write_text(source, encoding="utf-8")
            yield
        finally:
            for name, source in before.items():
                (self.package / name).write_text(source, encoding="utf-8")

    def executed(self, mutants: Sequence[Mutant], stages: Sequence[str]) -> Executed:
        """Ask the sound copy what these stages ask, once for a sample, and keep what executes which mutant.

        Raises:
            RuntimeError: It does not pass in a stage in which mutants are to be judged.
        """
        digest = hashlib.sha256("".join(mutant.key for mutant in mutants).encode()).hexdigest()[:16]
        files = {OF_CHECKS: self.of_checks, tuple(set(KINDS) - set(OF_CHECKS)): self.folder / f"executed-{digest}.json"}
        result = Executed.of(mutants, SUBJECTS[self.subject].names)
        for file in files.values():
            if file.is_file():
                result.take(file.read_text(encoding="utf-8"))
        # The control before fuzzing asks the cases of `pairs`, too.
        kinds = [kind for kind in KINDS if kind in stages or (kind == "pairs" and "fuzz" in stages)]
        result.everywhere = [number for number, line in enumerate(map(line_of, mutants)) if not line]
        missing = self._missing(result, kinds)
        with self._marked(mutants) if missing else contextlib.nullcontext(Path()) as marks:
            for (name, kind), parts in missing.items():
                # Of checks some at a time, so that an interruption loses little.
                step = AT_ONCE if kind in OF_CHECKS else len(parts)
                for start in range(0, len(parts), step):
                    self._map(result, name, kind, parts[start : start + step], marks)
                    self._keep(result, files)
        if not result.sound and {"pairs", "fuzz"} & {*stages}:
            self.control()
            result.sound = True
            self._keep(result, files)
        return result

    def _missing(self, result: Executed, kinds: Sequence[str]) -> dict[tuple[str, str], list[str]]:
        """What has to be measured; what is asked no more is left out of what was."""
        missing = {}
        for kind in kinds:
            for name in result.parts:
                kept = result.parts[name].get(kind)
                if kind in OF_CHECKS or kept is None:
                    parts = self.judge.ask("parts", name, parts=[kind])["parts"]
                    result.parts[name][kind] = {part: on for part, on in (kept or {}).items() if part in parts}
                    missing[name, kind] = [part for part in parts if part not in result.parts[name][kind]]
        return {each: parts for each, parts in missing.items() if parts}

    def _map(self, result: Executed, name: str, kind: str, parts: Sequence[str], marks: Path) -> None:
        answer = self.judge.ask(kind, name, parts=parts, executed=str(marks), limit=7200)
        if not answer["executed"]:
            raise RuntimeError(f"{kind} of {name}: expected verdicts without any change, got {answer['failure']}")
        right = {part: on for part, on in answer["executed"].items() if part not in answer["wrong"]}
        result.parts[name][kind] |= right
        print(f"{name}, {kind}: {len(right)} of {len(parts)} parts", flush=True)

    def _keep(self, result: Executed, files: Mapping[tuple[str, ...], Path]) -> None:
        for kinds, file in files.items():
            if any(kind in of_name for of_name in result.parts.values() for kind in kinds) or kinds != OF_CHECKS:
                file.write_text(result.text(kinds, sound=kinds != OF_CHECKS), encoding="utf-8")

    def passes(self, name: str, kind: str, check: str) -> bool:
        """Whether the sound copy passes a check that a mutant fails; asked once."""
        if (name, kind, check) not in self.passed and not self.judge.ask(kind, name, parts=[check])["failure"]:
            self.passed.add((name, kind, check))
        return (name, kind, check) in self.passed

    def control(self) -> None:
        """See that the sound copy passes where mutants are asked all cases at once, and random ones.

        Raises:
            RuntimeError: It does not, so that any mutant would look caught.
        """
        names = SUBJECTS[self.subject].names
        for name in names:
            chunks = json.loads((self.folder / f"pairs-{name}.json").read_text(encoding="utf-8"))
            parts = [str(number) for number, _ in enumerate(chunks)]
            for kind, options in (("pairs", {"parts": parts}), ("fuzz", {"seconds": FUZZ_SECONDS / len(names)})):
                failure = self.judge.ask(kind, name, limit=7200, **options)["failure"]
                if failure:
                    raise RuntimeError(f"{kind} of {name}: expected success without any change, got {failure}")
                print(f"{name}, {kind}: the sound copy passes", flush=True)

    @contextlib.contextmanager
    def _marked(self, mutants: Sequence[Mutant]) -> Iterator[Path]:
        """Have a byte of a file set before each statement that a mutant changes, while the block lasts; lends the file."""
        marks = self.tree / MARKS
        marks.write_bytes(bytes(len(mutants)))
        (self.tree / f"{MARKS}_of_mutants.py").write_text(_MARKS.format(file=str(marks)), encoding="utf-8")
        with self.changed(self._with_marks(mutants)):
            yield marks

    def _with_marks(self, mutants: Sequence[Mutant]) -> dict[str, str]:
        lines: dict[str, dict[int, list[int]]] = {}
        for number, mutant in enumerate(mutants):
            if line := line_of(mutant):
                lines.setdefault(mutant.file, {}).setdefault(line, []).append(number)
        sources = {}
        for name, places in lines.items():
            text = (self.package / name).read_text(encoding="utf-8").splitlines()
            for line in sorted(places, reverse=True):
                indent = text[line - 1][: -len(text[line - 1].lstrip())]
                marks = "; ".join(f"__import__('{MARKS}_of_mutants').seen[{number}] = 1" for number in places[line])
                text.insert(line - 1, f"{indent}{marks}")
            sources[name] = "\n".join(text) + "\n"
            compile(sources[name], name, "exec")
        return sources


def line_of(mutant: Mutant) -> int:
    """Before which line the statement begins that a mutant changes; 0 if it is in no function's body."""
    source = (SUBJECTS[mutant.subject].source() / mutant.file).read_text(encoding="utf-8")
    return statement_at(ast.parse(source).body, source.splitlines(), mutant.first)


def environment(tree: Path) -> dict[str, str]:
    """That of a process that imports what lies in a tree."""
    return os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def prepared(home: Path, subject: str, kept: Path) -> Bench:
    """A copy of the tree and of the package, proved to be what is imported.

    Args:
        home: Where it is made.
        subject: Whose code is changed.
        kept: What stays when this run ends.

    Raises:
        RuntimeError: Something else than the copy would be imported.
    """
    tree, what = home / subject / "tree", SUBJECTS[subject]
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    for name in files:
        if (ROOT / name).is_file() and name.startswith(("fsdp_ref/", "fsdp_testing/", "docs/findings/")):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    package = tree.joinpath(*what.package.split(".")) if what.package == "fsdp_ref" else tree / "copied"
    if what.package != "fsdp_ref":
        shutil.copytree(what.source(), package, ignore=shutil.ignore_patterns("__pycache__"))
        finder = _COPY_OF_TORCH.format(package=what.package, folder=str(package))
        (tree / FINDER).write_text(finder, encoding="utf-8")
    asking = home / subject / "where.py"
    asking.write_text(_WHERE.format(module=what.module), encoding="utf-8")
    command = [sys.executable, str(asking)]
    done = subprocess.run(command, cwd=tree, env=environment(tree), capture_output=True, text=True, check=False)
    places = [Path(line) for line in done.stdout.split()]
    if len(places) != 4 or not all(place.is_relative_to(tree) for place in places):
        raise RuntimeError(f"imports: expected those of {tree} here and on ranks, got\n{done.stdout}{done.stderr}")
    # But for the file that names this folder, which is another each time.
    texts = sorted(path for path in tree.rglob("*") if path.suffix in (".py", ".toml") and path.name != FINDER)
    versions = metadata.version("torch").encode()
    contents = [path.read_text(encoding="utf-8") for path in (JUDGE, *texts)]
    codes = [code_of(text) if path.suffix == ".py" else text for path, text in zip((JUDGE, *texts), contents)]
    state = hashlib.sha256(versions + "".join(codes).encode()).hexdigest()[:24]
    folder = kept / f"{subject}-{state}"
    folder.mkdir(parents=True, exist_ok=True)
    of_checks = Path(__file__).with_name(f"sampled-mutants-executed-{subject}.json")
    return Bench(subject, tree, package, state, folder, of_checks, Judge(tree, what.package, folder))
