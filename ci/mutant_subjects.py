"""Whose code ci/sampled_mutants.py changes, which implementations are judged then, and the changes themselves."""

from __future__ import annotations

import ast
import difflib
import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import libcst
    from mutmut.mutation.file_mutation import Mutation

ROOT = Path(__file__).resolve().parents[1]


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
        ("fsdp_ref-composable", "fsdp_ref-wrapper", "fsdp_ref-flat", "fsdp_ref-replicate"),
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


def code_of(source: str) -> str:
    """The code of a Python file without comments, docstrings and layout: two files with the same code do the same."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [statement for statement in node.body if not _is_text(statement)] or [ast.Pass()]
    return ast.dump(tree)


def _is_text(statement: ast.stmt) -> bool:
    """Whether a statement is a string alone: a docstring, also of a constant."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


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
        occurrence: Which of equal changes in one function it is, from 1.
    """

    subject: str
    file: str
    function: str
    source: str
    diff: tuple[str, ...]
    first: int
    occurrence: int = 1

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
    def key(self) -> str:
        """It, however the rest of its file changes."""
        return hashlib.sha256(repr((*self.name, self.occurrence)).encode()).hexdigest()[:24]

    @property
    def identity(self) -> str:
        """The code of the changed file as a whole, so that a result holds for this code alone."""
        return hashlib.sha256(f"{self.place}\n{code_of(self.source)}".encode()).hexdigest()[:24]


def statement_at(
    body: Sequence[ast.stmt], lines: Sequence[str], line: int, within: int = 0, *, inside: bool = False
) -> int:
    """The line of the innermost statement of a function at `line` before which another can stand."""
    for statement in body:
        decorators = statement.decorator_list if isinstance(statement, ast.FunctionDef | ast.ClassDef) else ()
        start = min([statement.lineno, *(decorator.lineno for decorator in decorators)])
        if not start <= line <= (statement.end_lineno or start):
            continue
        before = lines[start - 1][: statement.col_offset]
        first = lines[start - 1].lstrip()
        if inside and not before.strip() and not first.startswith(("elif ", "elif(")):
            within = start
        deeper = inside or isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef)
        for block in _blocks(statement):
            at = statement_at(block, lines, line, within, inside=deeper)
            if at != within:
                return at
        return within
    return within


def _blocks(statement: ast.stmt) -> Iterator[Sequence[ast.stmt]]:
    for part in ("body", "orelse", "finalbody"):
        yield getattr(statement, part, None) or ()
    for part in ("handlers", "cases"):
        for each in getattr(statement, part, ()):
            yield each.body


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """A change that mutmut proposes, not written out yet: that takes long, and few are chosen."""

    subject: str
    file: str
    function: str
    module: libcst.Module
    mutation: Mutation

    @property
    def key(self) -> tuple[str, ...]:
        """What is changed where, without a line number."""
        before, after = self.mutation.original_node, self.mutation.mutated_node
        return self.file, self.function, self.module.code_for_node(before), self.module.code_for_node(after)

    def written_out(self, occurrence: int) -> Mutant:
        """The mutant that it makes."""
        import libcst
        from mutmut.mutation.file_mutation import deep_replace

        changed = deep_replace(self.module, self.mutation.original_node, self.mutation.mutated_node)
        source = _decorated(changed.code) if isinstance(changed, libcst.Module) else ""
        lines = list(difflib.unified_diff(_decorated(self.module.code).splitlines(), source.splitlines(), n=0))[2:]
        first = int((re.findall(r"^@@ -(\d+)", "\n".join(lines), flags=re.MULTILINE) or ["0"])[0])
        diff = tuple(line for line in lines if line[0] in "+-")
        return Mutant(self.subject, self.file, self.function, source, diff, first, occurrence)


_HIDDEN = "#~ "


def _undecorated(source: str) -> str:
    """Make comments of the decorators of functions: mutmut leaves decorated functions out, which ours need not be."""
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                for number in range(decorator.lineno - 1, decorator.end_lineno or decorator.lineno):
                    lines[number] = _HIDDEN + lines[number]
    return "".join(lines)


def _decorated(source: str) -> str:
    return re.sub(f"^{_HIDDEN}", "", source, flags=re.MULTILINE)


def proposals(subject: str, file: Path) -> Iterator[Proposal]:
    """Every change that mutmut proposes inside functions, but for changes of texts."""
    import libcst
    from mutmut.mutation.file_mutation import create_mutations

    name = file.relative_to(SUBJECTS[subject].source()).as_posix()
    module, mutations, _, _ = create_mutations(name, _undecorated(file.read_text(encoding="utf-8")))
    for mutation in mutations:
        function = mutation.contained_by_top_level_function
        text = (libcst.SimpleString, libcst.FormattedString, libcst.ConcatenatedString)
        if isinstance(function, libcst.FunctionDef) and not isinstance(mutation.original_node, text):
            yield Proposal(subject, name, function.name.value, module, mutation)


def chosen(subject: str, number: int, seed: int, only: str) -> list[Mutant]:
    """`number` mutants of a subject in a random order, the same for the same seed; any first part is a sample, too.

    A change elsewhere in the source changes nothing about which are chosen, so that results of earlier runs count.
    """
    home = SUBJECTS[subject].source()
    files = sorted({path for pattern in SUBJECTS[subject].files for path in home.glob(pattern)})
    proposed = [each for file in files for each in proposals(subject, file) if only in f"{each.file} {each.function}"]
    times: Counter[tuple[str, ...]] = Counter()
    order = {}
    for proposal in proposed:
        key = proposal.key
        times[key] += 1
        order[hashlib.sha256(repr((seed, *key, times[key])).encode()).digest()] = proposal, times[key]
    drawn = [order[digest] for digest in sorted(order)[:number]]
    print(f"{subject}: {len(proposed)} mutants, {len(drawn)} of them chosen", flush=True)
    return [proposal.written_out(occurrence) for proposal, occurrence in drawn]
