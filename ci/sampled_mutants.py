"""Would fsdp-testing notice a wrong line in the code that it judges? A random sample of mutants, tried one by one.

    python ci/sampled_mutants.py [SUBJECT ...] [--number N] [--seed S] [--shard I/N] [--minutes M] [--only TEXT] [--results FILE]

SUBJECT is `fsdp_ref`, or `torch-fsdp2` or `torch-fsdp1`: torch's own Python files, of which a copy is imported. mutmut proposes
the changes, `--seed` chooses N of each subject, each is written into the copy, and the harness alone looks at it: random cases for a
minute, the checks, every pair of traits, random cases for five minutes more; no unit test. Changes of texts are left out.

Each result is appended to FILE, and a later run goes on where this one stopped: what was caught stays caught while the source
stays; what was not is tried again after the harness changed. Exit code: 0 all survivors are explained
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

ROOT = Path(__file__).resolve().parents[1]
EXPLAINED = Path(__file__).with_name("sampled-mutants-explained.toml")
RESULTS = ROOT / "mutants" / "sampled.jsonl"
KNOWN = "fsdp_testing/checks/findings/known_failures.toml"


@dataclass(frozen=True, slots=True)
class Subject:
    """What is changed, and who is judged then.

    Attributes:
        package: That is copied; what it is called when it is imported.
        files: Patterns of files in it.
        names: Implementations made of it.
        module: One of its modules, of which every process says where it comes from.
    """

    package: str
    files: tuple[str, ...]
    names: tuple[str, ...]
    module: str

    def source(self) -> Path:
        """The folder of the package that is copied: in this repository, or where it is installed."""
        if self.package == "fsdp_ref":
            return ROOT / "fsdp_ref"
        import torch

        return Path(torch.__file__).parent.joinpath(*self.package.split(".")[1:])


SUBJECTS = {
    "fsdp_ref": Subject(
        "fsdp_ref",
        tuple(
            f"{room}/*.py"
            for room in ["runtime", "handle", "comm", "checkpoint", "training", "replicas", "build", "storage"]
        ),
        ("fsdp_ref-composable", "fsdp_ref-wrapper"),
        "fsdp_ref.comm.collectives",
    ),
    "torch-fsdp2": Subject(
        "torch.distributed.fsdp",
        ("_fully_shard/*.py",),
        ("torch-fsdp2",),
        "torch.distributed.fsdp._fully_shard._fsdp_param",
    ),
    "torch-fsdp1": Subject(
        "torch.distributed.fsdp",
        tuple(
            f"{file}.py"
            for file in (
                "fully_sharded_data_parallel",
                "_flat_param",
                "_runtime_utils",
                "_init_utils",
                "_state_dict_utils",
                "_optim_utils",
                "_unshard_param_utils",
                "_exec_order_utils",
            )
        ),
        ("torch-fsdp1",),
        "torch.distributed.fsdp._flat_param",
    ),
}
SECONDS = 1800
"""Until a stage counts as hung: several times what it takes, so that a busy machine makes no mutant look caught."""
_VERIFY = ("-c", "from fsdp_testing.cli.main import main; raise SystemExit(main())")
STAGES: dict[str, tuple[str, ...]] = {
    "fuzz": ("fuzz", "--seconds", "60", "--stop-at-first", "--no-scripts"),
    "run": ("run", "--explain", "0", "--expected-failures", KNOWN),
    "pairs": ("run", "--pairs"),
    "fuzz for long": ("fuzz", "--seconds", "300", "--seed", "1", "--stop-at-first", "--no-scripts"),
}
"""Who looks at a mutant, the quickest first."""
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
_HUNG = re.compile(r"\bhung\b|not ended after|^Timeout \(", re.MULTILINE)
_NOT_ENDED = 124


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one file.

    Attributes:
        subject: Of which it is.
        file: Path in the package.
        function: Name of the function or method that is changed.
        source: The whole file, changed.
        diff: The change, as lines of a unified diff.
        first: First line that is changed, in the file as it is.
    """

    subject: str
    file: str
    function: str
    source: str
    diff: tuple[str, ...]
    first: int

    @property
    def place(self) -> str:
        """The file with its package, for counting and telling."""
        return f"{SUBJECTS[self.subject].package.replace('.', '/')}/{self.file}"

    def text(self, sign: str) -> str:
        """Lines that go (`-`) or come (`+`), in one line."""
        return " ".join(line[1:].strip() for line in self.diff if line[0] == sign)

    @property
    def name(self) -> tuple[str, str, str, str]:
        """How ci/sampled-mutants-explained.toml knows it: no line numbers, which shift."""
        return self.place, self.function, self.text("-"), self.text("+")

    @property
    def identity(self) -> str:
        """The changed file as a whole, so that a result holds for this source alone."""
        return hashlib.sha256(f"{self.place}\n{self.source}".encode()).hexdigest()[:24]


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of a mutant.

    Attributes:
        mutant: Its identity.
        stage: What failed first; empty if nothing did.
        account: The failing check or finding; empty if there is none.
        asked: Stages that looked at it and found nothing, or the last one something.
        hung: It was caught because ranks, or all of it, did not end.
        harness: State of the harness that looked at it.
        seconds: How long that took.
    """

    mutant: str
    stage: str
    account: str
    asked: Sequence[str]
    hung: bool
    harness: str
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """A change that mutmut proposes, not written out yet: that takes long, and few are chosen."""

    subject: str
    file: str
    function: str
    module: libcst.Module
    mutation: Mutation

    def written_out(self) -> Mutant:
        """The mutant that it makes."""
        changed = deep_replace(self.module, self.mutation.original_node, self.mutation.mutated_node)
        source = changed.code if isinstance(changed, libcst.Module) else ""
        lines = list(difflib.unified_diff(self.module.code.splitlines(), source.splitlines(), n=0))[2:]
        first = int((re.findall(r"^@@ -(\d+)", "\n".join(lines), flags=re.MULTILINE) or ["0"])[0])
        return Mutant(
            self.subject, self.file, self.function, source, tuple(line for line in lines if line[0] in "+-"), first
        )


def proposals(subject: str, file: Path) -> Iterator[Proposal]:
    """Every change that mutmut proposes inside functions, but for changes of texts."""
    name = file.relative_to(SUBJECTS[subject].source()).as_posix()
    module, mutations, _, _ = create_mutations(name, file.read_text(encoding="utf-8"))
    for mutation in mutations:
        function = mutation.contained_by_top_level_function
        text = (libcst.SimpleString, libcst.FormattedString, libcst.ConcatenatedString)
        if isinstance(function, libcst.FunctionDef) and not isinstance(mutation.original_node, text):
            yield Proposal(subject, name, function.name.value, module, mutation)


def chosen(subject: str, number: int, seed: int, only: str, shard: tuple[int, int]) -> list[Mutant]:
    """`number` mutants of a subject, the same for the same seed and source; of these the part of a shard."""
    home = SUBJECTS[subject].source()
    files = sorted({path for pattern in SUBJECTS[subject].files for path in home.glob(pattern)})
    found = [each for file in files for each in proposals(subject, file) if only in f"{each.file} {each.function}"]
    drawn = random.Random(f"{seed} {subject}").sample(found, min(number, len(found)))
    print(f"{subject}: {len(found)} mutants, {len(drawn)} of them chosen", flush=True)
    return [each.written_out() for each in drawn[shard[0] - 1 :: shard[1]]]


@dataclass(frozen=True, slots=True)
class Bench:
    """Where mutants of a subject are tried.

    Attributes:
        subject: Its name.
        tree: A copy of the repository; only this is imported, by the controller and by ranks.
        package: The copy of the package that is changed.
        state: Stands for the harness in the tree.
    """

    subject: str
    tree: Path
    package: Path
    state: str

    def fate(self, mutant: Mutant, stage: str, before: Fate | None) -> Fate:
        """Writes the mutant into the copy, lets a stage look at it, and takes it back."""
        place = self.package / mutant.file
        original = place.read_text(encoding="utf-8")
        start = time.monotonic()
        place.write_text(mutant.source, encoding="utf-8")
        try:
            code, output = self.asked(stage)
        finally:
            place.write_text(original, encoding="utf-8")
        asked, seconds = ((), 0.0) if before is None else (before.asked, before.seconds)
        return Fate(
            mutant.identity,
            stage if code else "",
            _account(output) if code else "",
            (*asked, stage),
            bool(code and _HUNG.search(output)),
            self.state,
            round(seconds + time.monotonic() - start, 1),
        )

    def asked(self, stage: str) -> tuple[int, str]:
        """Exit code and output of a stage, for the first implementation that is refuted; 0 if none is."""
        command, *options = STAGES[stage]
        for name in SUBJECTS[self.subject].names:
            state = self.tree.parent / "state"
            shutil.rmtree(state, ignore_errors=True)
            keeps = ("--state", str(state)) if command == "fuzz" or "--pairs" in options else ()
            code, output = run(self.tree, *_VERIFY, command, name, *options, *keeps)
            if code:
                return code, output
        return 0, ""


def run(tree: Path, *arguments: str, seconds: float = SECONDS) -> tuple[int, str]:
    """Python on the tree: exit code and output; 124 for what does not end, which is ended with all that it started."""
    command, said = [sys.executable, *arguments], subprocess.PIPE
    with subprocess.Popen(
        command,
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
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
    refuted = re.findall(r"^(\S+: after .*|\s+\S+ .*\b(?:FAIL|unknown)\b.*)$", output, flags=re.MULTILINE)
    return (refuted or output.strip().splitlines()[-1:] or [""])[0].strip()[:200]


def prepared(home: Path, subject: str, *, sound: bool) -> Bench:
    """A copy of the tree and of the package, proved to be what is imported, and that every stage finds it sound.

    Raises:
        RuntimeError: Something else than the copy would be imported, or a stage refutes it as it is.
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
        (tree / "sitecustomize.py").write_text(finder, encoding="utf-8")
    asking = tree / "where.py"
    asking.write_text(_WHERE.format(module=what.module), encoding="utf-8")
    code, output = run(tree, str(asking))
    if code or len(output.split()) != 4 or not all(Path(each).is_relative_to(tree) for each in output.split()):
        raise RuntimeError(f"imports: expected those of {tree} here and on ranks, got\n{output}")
    texts = sorted(path for path in tree.rglob("*.py") if path not in (tree / "sitecustomize.py", asking))
    bench = Bench(
        subject, tree, package, hashlib.sha256(b"".join(path.read_bytes() for path in texts)).hexdigest()[:24]
    )
    for stage in STAGES if sound else ():
        code, output = bench.asked(stage)
        if code:
            raise RuntimeError(f"{stage}: expected success without any change, got\n{output[-3000:]}")
    return bench


def known_fates(results: Path) -> dict[str, Fate]:
    """The last result of each mutant; a line that was cut off by an interruption is as if never written."""
    found: dict[str, Fate] = {}
    for line in results.read_text(encoding="utf-8").splitlines() if results.is_file() else ():
        with contextlib.suppress(json.JSONDecodeError):
            fate = Fate(**json.loads(line)["fate"])
            found[fate.mutant] = fate
    return found


def attempted(mutants: Sequence[Mutant], bench: Bench, results: Path, until: float) -> dict[str, Fate]:
    """Tries what has no result yet, stage by stage, until the time has passed; returns all results of this harness."""
    known = {name: fate for name, fate in known_fates(results).items() if fate.stage or fate.harness == bench.state}
    for stage in STAGES:
        for number, mutant in enumerate(mutants, start=1):
            before = known.get(mutant.identity)
            if time.monotonic() > until or (before is not None and (before.stage or stage in before.asked)):
                continue
            fate = known[mutant.identity] = bench.fate(mutant, stage, before)
            said = {"fate": asdict(fate), "file": mutant.place, "line": mutant.first, "diff": mutant.diff}
            with results.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(said) + "\n")
            end = f"caught{' (hung)' if fate.hung else ''}: {fate.account}" if fate.stage else "not caught so far"
            print(f"{number}/{len(mutants)} {stage}, {fate.seconds} s: {mutant.place}:{mutant.first} {mutant.function}")
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
    """Tells the share that was caught, by file, and every survivor; returns the exit code."""
    known = explanations()
    tried = [mutant for mutant in mutants if mutant.identity in fates]
    left = [mutant for mutant in tried if not fates[mutant.identity].stage]
    equivalent = [mutant for mutant in left if mutant.name in known]
    print("\ntried  caught  (hung)  equivalent  caught of the others, 95 % interval  where; by stage")
    for place in (*dict.fromkeys(mutant.place for mutant in tried), ""):
        here = [fates[mutant.identity] for mutant in tried if place in ("", mutant.place)]
        same = sum(place in ("", mutant.place) for mutant in equivalent)
        caught, judged = sum(bool(fate.stage) for fate in here), len(here) - same
        low, high = wilson(caught, judged)
        by = ", ".join(f"{stage} {count}" for stage in STAGES if (count := sum(fate.stage == stage for fate in here)))
        share = f"{caught} of {judged}: {caught / max(1, judged):.1%} ({low:.1%} to {high:.1%})"
        print(f"{len(here):5} {caught:7} {sum(f.hung for f in here):7} {same:11}  {share}  {place or 'all'}; {by}")
    for mutant in left:
        why = known.get(mutant.name)
        print(f"\n{'equivalent' if why else 'NOT CAUGHT'}: {mutant.place}:{mutant.first} {mutant.function}")
        print("\n".join(f"    {line}" for line in mutant.diff))
        print(f"    {why or f'asked: {chr(44).join(fates[mutant.identity].asked)}'}")
    half = [mutant for mutant in left if set(STAGES) - set(fates[mutant.identity].asked)]
    waiting = len(mutants) - len(tried) + len(half)
    if waiting:
        print(f"\n{waiting} of {len(mutants)} were not tried, or not by every stage; run again to go on")
    return 0 if len(left) == len(equivalent) and not waiting else 1


def part(text: str) -> tuple[int, int]:
    """`I/N`."""
    first, _, of = text.partition("/")
    return int(first), int(of)


def main() -> int:
    """Choose, try, tell; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subjects", nargs="*", default=["fsdp_ref"], metavar="SUBJECT", help=", ".join(SUBJECTS))
    parser.add_argument("--number", type=int, default=20, help="mutants of each subject (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="which (default: 0)")
    parser.add_argument("--shard", type=part, default=(1, 1), metavar="I/N", help="the I-th of N parts of them")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no mutant after so long")
    parser.add_argument("--only", default="", help="only mutants whose file and function contain this")
    parser.add_argument("--stages", default=",".join(STAGES), help="who looks at them (default: all)")
    parser.add_argument(
        "--unproved", action="store_true", help="do not see first that every stage passes without a change"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="where results are kept (default: mutants/)")
    asked = parser.parse_args()
    until = time.monotonic() + 60 * asked.minutes
    asked.results.parent.mkdir(parents=True, exist_ok=True)
    for stage in set(STAGES) - set(asked.stages.split(",")):
        del STAGES[stage]
    mutants: list[Mutant] = []
    fates: dict[str, Fate] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for subject in asked.subjects:
            mine = chosen(subject, asked.number, asked.seed, asked.only, asked.shard)
            mutants += mine
            try:
                bench = prepared(Path(scratch).resolve(), subject, sound=not asked.unproved)
                fates |= attempted(mine, bench, asked.results, until)
            except RuntimeError as failure:
                print(f"nothing more was tried: {failure}")
                return 2
            except KeyboardInterrupt:
                fates |= known_fates(asked.results)
                break
    return report(mutants, fates)


if __name__ == "__main__":
    sys.exit(main())
