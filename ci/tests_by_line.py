"""Which tests execute a line of the reference, on ranks too? Those that cover it are the ones that can notice a change of it.

One run of the tests under coverage, with the test function as context, in each rank as in the controller. What a rank
that was killed executed is not known, so that a line may seem less covered than it is, never more.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from coverage import CoverageData

PYTEST = ("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not gpu and not slow")
TESTS = "tests/fsdp_ref"
_SETTINGS = """[run]
source = fsdp_ref
parallel = true
data_file = {data}/c
concurrency = multiprocessing,thread
sigterm = true
dynamic_context = test_function
"""


@dataclass(frozen=True, slots=True)
class TestsByLine:
    """What each test function executes.

    Attributes:
        lines: By file of the reference and line: node ids of test functions. An empty id stands for code that no test
            function called (imports, fixtures).
        breadth: Lines that each test function executes.
    """

    __test__ = False
    lines: Mapping[str, Mapping[int, frozenset[str]]]
    breadth: Mapping[str, int]

    def executing(self, file: str, lines: Iterable[int]) -> tuple[str, ...]:
        """Tests that execute one of the lines: the file's own first, then whole files, the most specific ones first.

        The folder of all tests stands for lines that only run outside of test functions; nothing for lines that never run.
        """
        known = self.lines.get(file, {})
        found = frozenset().union(*(known.get(line, frozenset()) for line in lines))
        named = found - {""}
        if found and not named:
            return (TESTS,)
        narrowest = {place: min(self.breadth[test] for test in group) for place, group in _by_file(named).items()}
        own = f"{TESTS}/{'/'.join(Path(file).parts[1:-1])}/"

        def order(test: str) -> tuple[bool, int, str, int, str]:
            place = test.partition("::")[0]
            return not place.startswith(own), narrowest[place], place, self.breadth[test], test

        return tuple(sorted(named, key=order))


def _by_file(tests: Iterable[str]) -> dict[str, list[str]]:
    groups = defaultdict(list)
    for test in tests:
        groups[test.partition("::")[0]].append(test)
    return groups


def node_id(tree: Path, context: str) -> str:
    """`tests.a.test_b.Class.test_c` as pytest names it; an empty id if no test function of `tree` has that name."""
    parts = context.split(".")
    for length in range(len(parts) - 1, 0, -1):
        file = Path(*parts[:length]).with_suffix(".py")
        if (tree / file).is_file() and parts[0] == "tests":
            return "::".join((file.as_posix(), *parts[length:]))
    return ""


def environment(tree: Path) -> dict[str, str]:
    """Variables under which `tree` is imported, whatever is installed."""
    return os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def measured(tree: Path, scratch: Path, environment: Mapping[str, str]) -> TestsByLine:
    """Runs the tests of the reference in `tree` under coverage.

    Raises:
        RuntimeError: A test fails.
    """
    settings = scratch / "coverage.ini"
    settings.write_text(_SETTINGS.format(data=scratch), encoding="utf-8")
    command = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings}", *PYTEST, TESTS]
    done = subprocess.run(command, cwd=tree, env=dict(environment), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{TESTS}: expected tests that pass without any change, got\n{done.stdout[-3000:]}")
    return _read(tree, scratch.glob("c.*"))


def _read(tree: Path, files: Iterable[Path]) -> TestsByLine:
    lines: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    names: dict[str, str] = {"": ""}
    for path in files:
        data = CoverageData(os.fspath(path))
        data.read()
        for measured_file in data.measured_files():
            file = Path(measured_file).relative_to(tree).as_posix()
            for line, contexts in data.contexts_by_lineno(measured_file).items():
                for context in contexts:
                    names.setdefault(context, node_id(tree, context))
                    lines[file][line].add(names[context])
    breadth = Counter(test for by_line in lines.values() for tests in by_line.values() for test in tests)
    return TestsByLine(
        {file: {line: frozenset(tests) for line, tests in by_line.items()} for file, by_line in lines.items()},
        breadth,
    )


def saved(found: TestsByLine, path: Path, state: str) -> None:
    """Writes it beside the results, for the tests and sources that `state` stands for."""
    tests = list(found.breadth)
    number = {test: index for index, test in enumerate(tests)}
    lines = {
        file: {str(line): sorted(number[test] for test in group) for line, group in by_line.items()}
        for file, by_line in found.lines.items()
    }
    document = {"state": state, "tests": tests, "breadth": list(found.breadth.values()), "lines": lines}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document), encoding="utf-8")


def loaded(path: Path, state: str) -> TestsByLine | None:
    """What was saved for this state; None if nothing was."""
    if not path.is_file():
        return None
    document = json.loads(path.read_text(encoding="utf-8"))
    if document["state"] != state:
        return None
    tests = document["tests"]
    lines = {
        file: {int(line): frozenset(tests[index] for index in group) for line, group in by_line.items()}
        for file, by_line in document["lines"].items()
    }
    return TestsByLine(lines, dict(zip(tests, document["breadth"], strict=True)))


def statement_lines(source: str, first: int, last: int) -> range:
    """Lines of the statements that `first` to `last` belong to; of a function's head, the lines of all of it."""
    low, high = first, last
    for number in (first, last):
        around = [
            node
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.stmt) and node.lineno <= number <= (node.end_lineno or node.lineno)
        ]
        inner = min(around, key=lambda node: (node.end_lineno or 0) - node.lineno, default=None)
        if inner is None:
            continue
        body: list[ast.stmt] = getattr(inner, "body", [])
        whole = isinstance(inner, (ast.FunctionDef, ast.ClassDef)) or not body
        low = min(low, inner.lineno)
        high = max(high, (inner.end_lineno or number) if whole else max(number, body[0].lineno - 1))
    return range(low, high + 1)
