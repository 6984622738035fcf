"""Would anybody notice a wrong line in the code that moves and frees memory? A random sample of mutants, tried one by one.

    python ci/sampled_mutants.py [FOLDER ...] [--sample N] [--seed S] [--jobs N] [--only TEXT]

The layout is tried line by line (ci/mutants.py); its tests take seconds and need no ranks. What runs on ranks is tried on
a sample: mutmut proposes the changes, `--seed` chooses N of each folder, each is written into a copy of the repository and
meets the folder's own tests, the tests of behaviour, and the conformance suite, in this order, until something fails.
Changes of texts are left out. Exit code: 0 all survivors are explained, 1 some are not, 2 nothing could be tried.
"""

from __future__ import annotations

import argparse
import difflib
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import libcst
from mutants import Survivor, explanations
from mutmut.mutation.file_mutation import Mutation, create_mutations, deep_replace

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("fsdp_ref/handle", "fsdp_ref/runtime", "fsdp_ref/comm", "fsdp_ref/storage", "fsdp_ref/training")
SECONDS = 1200
_PYTEST = ("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not gpu and not slow")
_VERIFY = ("-c", "from fsdp_testing.cli.main import main; raise SystemExit(main())", "run", "--explain", "0")


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one file.

    Attributes:
        file: Path in the repository.
        function: The top-level function or method's class around it.
        source: The whole file, changed.
        removed: Lines that go.
        added: Lines that come in their place.
    """

    file: str
    function: str
    source: str
    removed: str
    added: str

    @property
    def known_as(self) -> Survivor:
        """How ci/mutants-explained.toml names it."""
        return Survivor(f"{self.file.removesuffix('.py').replace('/', '.')}.{self.function}", self.removed, self.added)


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
        lines = list(difflib.unified_diff(self.module.code.splitlines(), source.splitlines(), n=0))[3:]
        texts = {sign: " ".join(line[1:].strip() for line in lines if line[0] == sign) for sign in "-+"}
        return Mutant(self.file, self.function, source, texts["-"], texts["+"])


def proposals(file: Path) -> Iterator[Proposal]:
    """Every change that mutmut proposes inside functions, but for changes of texts."""
    name = str(file.relative_to(ROOT))
    module, mutations, _, _ = create_mutations(name, file.read_text(encoding="utf-8"))
    for mutation in mutations:
        function = mutation.contained_by_top_level_function
        text = (libcst.SimpleString, libcst.FormattedString, libcst.ConcatenatedString)
        if isinstance(function, libcst.FunctionDef) and not isinstance(mutation.original_node, text):
            yield Proposal(name, function.name.value, module, mutation)


def chosen(folders: Sequence[str], sample: int, seed: int, only: str) -> list[Mutant]:
    """`sample` mutants of each folder, the same for the same seed and source."""
    picked: list[Mutant] = []
    for folder in folders:
        files = sorted(path for path in (ROOT / folder).rglob("*.py") if path.name != "__init__.py")
        found = [each for file in files for each in proposals(file) if only in f"{each.file} {each.function}"]
        drawn = random.Random(f"{seed} {folder}").sample(found, min(sample, len(found)))
        picked += [proposal.written_out() for proposal in drawn]
        print(f"{folder}: {len(found)} mutants, {min(sample, len(found))} of them tried", flush=True)
    return picked


def stages(files: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Who looks at changes of these files, cheapest first: commands of Python by name."""
    own = dict.fromkeys(Path("tests") / Path(file).parent for file in files)
    found: dict[str, tuple[str, ...]] = {
        str(tests): (*_PYTEST, str(tests)) for tests in own if any((ROOT / tests).glob("test_*.py"))
    }
    found["behaviour"] = (*_PYTEST, "tests/fsdp_ref/behaviours", "tests/fsdp_ref/runtime")
    found["conformance"] = (*_VERIFY, "fsdp_ref-composable", "fsdp_ref-wrapper")
    return found


@dataclass(frozen=True, slots=True)
class Fate:
    """The first stage that fails; an empty name if none does."""

    stage: str = ""
    output: str = ""


def noticed_by(copy: Path, commands: Mapping[str, tuple[str, ...]]) -> Fate:
    """What the stages make of the tree in `copy`."""
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    for stage, command in commands.items():
        try:
            done = subprocess.run(
                [sys.executable, *command],
                cwd=copy,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Fate(f"{stage} (not ended after {SECONDS} s)")
        if done.returncode:
            return Fate(stage, done.stdout[-3000:])
    return Fate()


def copied(home: Path) -> Path:
    """A copy of what git knows of this tree."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    for name in files:
        if (ROOT / name).is_file():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, home / name)
    return home


def attempt(waiting: queue.SimpleQueue[Mutant], home: Path, fates: list[tuple[Mutant, Fate]]) -> None:
    """Tries mutants until none waits; one copy of the tree for each worker."""
    while True:
        try:
            mutant = waiting.get_nowait()
        except queue.Empty:
            return
        place = home / mutant.file
        place.write_text(mutant.source, encoding="utf-8")
        fate = noticed_by(home, stages([mutant.file]))
        shutil.copy(ROOT / mutant.file, place)
        fates.append((mutant, fate))
        told = fate.stage or "NOT NOTICED"
        print(
            f"{len(fates)}: {mutant.file} {mutant.function}: {told}\n  - {mutant.removed}\n  + {mutant.added}",
            flush=True,
        )


def main() -> int:
    """Choose, try, compare; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", default=FOLDERS, metavar="FOLDER", help=f"default: {' '.join(FOLDERS)}")
    parser.add_argument("--sample", type=int, default=20, help="mutants of each folder (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="which (default: 0)")
    parser.add_argument("--jobs", type=int, default=2, help="so many side by side (default: 2)")
    parser.add_argument("--only", default="", help="only mutants whose file and function contain this")
    asked = parser.parse_args()
    mutants = chosen(asked.folders, asked.sample, asked.seed, asked.only)
    fates: list[tuple[Mutant, Fate]] = []
    with tempfile.TemporaryDirectory() as scratch:
        homes = [copied(Path(scratch) / str(number)) for number in range(asked.jobs)]
        failing = noticed_by(homes[0], stages(mutant.file for mutant in mutants))
        if failing.stage:
            print(f"nothing was tried: {failing.stage} fails without any change\n{failing.output}")
            return 2
        waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
        for mutant in mutants:
            waiting.put(mutant)
        workers = [threading.Thread(target=attempt, args=(waiting, home, fates)) for home in homes]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    return report(fates)


def report(fates: Sequence[tuple[Mutant, Fate]]) -> int:
    """Tells who noticed how many, and every survivor; returns the exit code."""
    known = explanations()
    survivors = [mutant for mutant, fate in fates if not fate.stage]
    equivalent = [mutant for mutant in survivors if mutant.known_as in known]
    for stage, number in Counter(fate.stage for _, fate in fates if fate.stage).most_common():
        print(f"{number} noticed by {stage}")
    judged, caught = len(fates) - len(equivalent), len(fates) - len(survivors)
    print(f"{caught} of {judged} that change what the code does were noticed: {100 * caught / max(1, judged):.1f} %")
    for mutant in survivors:
        if mutant not in equivalent:
            print(f"not noticed: {mutant.known_as.function}\n  - {mutant.removed}\n  + {mutant.added}")
    return 0 if len(survivors) == len(equivalent) else 1


if __name__ == "__main__":
    sys.exit(main())
