"""The rules of the house style that can be checked, and where the source tree breaks them.

Pure functions from source text to offences; `tests/arch` applies them to the tree and proves on planted faults that
each rule can fail. Nothing here imports the packages that it reads.
"""

from __future__ import annotations

import ast
import graphlib
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("fsdp_ref", "fsdp_testing")
FORBIDDEN_STEMS = re.compile(r"(_utils|_util|common|helpers|helper|misc)$")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Offence:
    """One broken rule: `where` is `path:line`, `name` the qualified name inside the file ("" for the whole file)."""

    rule: str
    path: str
    line: int
    name: str
    said: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.name + ': ' if self.name else ''}{self.said}"


def settings() -> dict[str, Any]:
    """The rules and exceptions of ci/architecture.toml."""
    return tomllib.loads((ROOT / "ci/architecture.toml").read_text(encoding="utf-8"))


def python_files(*tops: str) -> list[Path]:
    """Every Python file below the given folders, sorted, relative to the repository."""
    return sorted(path.relative_to(ROOT) for top in tops for path in (ROOT / top).rglob("*.py"))


def parse(path: Path) -> ast.Module:
    """Syntax tree of a file given relative to the repository."""
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), filename=str(path))


# ---------------------------------------------------------------------------------------------- budgets
def budget_offences(path: str, source: str, limits: dict[str, int]) -> Iterator[Offence]:
    """Files, functions, parameter lists and classes beyond their limit."""
    lines = source.count("\n")
    most = limits["test_file_lines" if path.startswith("tests/") else "file_lines"]
    if lines > most:
        yield Offence("file_lines", path, 1, "", f"{lines} lines, at most {most}")
    for name, node in _named_nodes(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            public = [item.name for item in node.body if isinstance(item, Function) and not item.name.startswith("_")]
            if len(public) > limits["public_methods"]:
                said = f"{len(public)} public methods, at most {limits['public_methods']}"
                yield Offence("public_methods", path, node.lineno, name, said)
            continue
        length = _body_lines(node)
        if length > limits["function_lines"]:
            said = f"{length} lines, at most {limits['function_lines']}"
            yield Offence("function_lines", path, node.lineno, name, said)
        count = _parameter_count(node)
        if count > limits["parameters"]:
            yield Offence("parameters", path, node.lineno, name, f"{count} parameters, at most {limits['parameters']}")


def _named_nodes(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function | ast.ClassDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function | ast.ClassDef):
            yield prefix + node.name, node
            yield from _named_nodes(node, f"{prefix}{node.name}.")
        else:
            yield from _named_nodes(node, prefix)


def _body_lines(node: Function) -> int:
    total = (node.end_lineno or node.lineno) - node.lineno + 1
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        total -= (first.end_lineno or first.lineno) - first.lineno + 1
    return total


def _parameter_count(node: Function) -> int:
    arguments = node.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return len([argument for argument in named if argument.arg not in {"self", "cls"}])


# ---------------------------------------------------------------------------------------------- banned constructs
def banned_offences(path: str, source: str) -> Iterator[Offence]:
    """Constructs that the house style bans, wherever they stand in a package or a test."""
    in_tests = path.startswith("tests/")
    in_cli = path.startswith(("fsdp_testing/cli/", "fsdp_ref/plan/__main__.py"))
    in_env = path in {"fsdp_testing/base/env.py", "fsdp_ref/env.py"}
    tree = ast.parse(source)
    if re.search(r"\?(\s|$)", (ast.get_docstring(tree) or "").partition("\n")[0]):
        yield Offence("question", path, 1, "", "say what the module is or does")
    for node in ast.walk(tree):
        text = ast.unparse(node) if isinstance(node, ast.Attribute | ast.Call | ast.Raise) else ""
        line = getattr(node, "lineno", 1)
        if _is_reference(node, "no_type_check"):
            yield Offence("no_type_check", path, line, "", "annotate, or say why with a coded ignore")
        if in_tests and isinstance(node, ast.Call) and text.startswith("time.sleep(") and not _is_planted_hang(node):
            yield Offence("sleep", path, line, "", "wait for an event instead")
        if in_tests:
            continue
        if isinstance(node, ast.Attribute) and text in {"os.environ", "os.getenv", "os.putenv"} and not in_env:
            yield Offence("environment", path, line, "", "read and write the environment in env.py alone")
        if isinstance(node, ast.Call) and text.startswith("print(") and not in_cli:
            yield Offence("print", path, line, "", "return text, or log it")
        if not in_cli and (text == "sys.exit" or (isinstance(node, ast.Raise) and "SystemExit" in text)):
            yield Offence("exit", path, line, "", "raise an error of the package's tree")
        if isinstance(node, ast.Call) and text.startswith("hasattr(self"):
            yield Offence("hasattr", path, line, "", "set every attribute in __init__")


def _is_planted_hang(node: ast.Call) -> bool:
    """A sleep of a minute or more is a rank that hangs on purpose: nobody waits for its end."""
    argument = node.args[0] if node.args else None
    return isinstance(argument, ast.Constant) and isinstance(argument.value, int | float) and argument.value >= 60


def _is_reference(node: ast.AST, name: str) -> bool:
    return (isinstance(node, ast.Name) and node.id == name) or (isinstance(node, ast.Attribute) and node.attr == name)


def bare_ignores(path: str, source: str) -> Iterator[Offence]:
    """`type: ignore` without a code or without a reason after it; `noqa` without a code."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if re.search(r"type:\s*ignore", token.string) and not re.search(
            r"type:\s*ignore\[[\w\-, ]+\]\s*#\s*\S", token.string
        ):
            yield Offence("ignore", path, token.start[0], "", "give the code and a reason: type: ignore[code]  # why")
        if re.search(r"#\s*noqa(?!:\s*[A-Z])", token.string):
            yield Offence("noqa", path, token.start[0], "", "name the rule: noqa: B007")


def is_stored_attribute(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)


# ---------------------------------------------------------------------------------------------- imports
def imported_modules(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import statement, those inside functions included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.lineno, node.module
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def is_below(module: str, parent: str) -> bool:
    return module == parent or module.startswith(parent + ".")


def _in_folder(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def reserved_import_offences(path: str, source: str, rules: list[dict[str, Any]]) -> Iterator[Offence]:
    """Imports of a module that is reserved for other files."""
    seen: set[tuple[int, str]] = set()
    for line, module in imported_modules(ast.parse(source)):
        for rule in rules:
            applies = any(_in_folder(path, top) for top in [rule["within"]] if top) if "within" in rule else True
            permitted = any(_in_folder(path, place) for place in rule["only"])
            key = (line, rule["module"])
            if applies and not permitted and is_below(module, rule["module"]) and key not in seen:
                seen.add(key)
                yield Offence("reserved_import", path, line, "", f"imports {module}. {rule['reason']}")


def stdlib_only_offences(path: str, source: str, rules: list[dict[str, Any]]) -> Iterator[Offence]:
    """Imports beyond the standard library in folders that promise to need nothing else."""
    for rule in rules:
        if not _in_folder(path, rule["folder"]):
            continue
        for node, later in _imports(ast.parse(source)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or "."]
            allies = [*rule["may_also"], *(rule.get("in_functions", ()) if later else ())]
            for name in names:
                permitted = name.split(".")[0] in sys.stdlib_module_names
                if not permitted and not any(is_below(name, ally) for ally in allies):
                    said = f"imports {name}; {rule['folder']} needs the standard library alone"
                    yield Offence("stdlib_only", path, getattr(node, "lineno", 1), "", said)


def _imports(tree: ast.AST, *, later: bool = False) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Yield the imports that happen, each with whether a function makes it; those for annotations alone never happen."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node, later
        elif not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield from _imports(node, later=later or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def import_cycle(sources: dict[str, str]) -> list[str] | None:
    """A cycle of module-level imports among the given modules (dotted name -> source), or None."""
    graph: dict[str, set[str]] = {}
    for name, source in sources.items():
        wanted = {module for node in _top_level_imports(ast.parse(source)) for module in _needed(node, sources)}
        graph[name] = {module for module in wanted if module in sources and module != name}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(reversed(error.args[1]))
    return None


def _top_level_imports(tree: ast.Module) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in tree.body:
        inside = ast.walk(node) if isinstance(node, ast.Try) else [node]
        yield from (item for item in inside if isinstance(item, ast.Import | ast.ImportFrom))


def _needed(node: ast.Import | ast.ImportFrom, sources: dict[str, str]) -> Iterator[str]:
    """Modules that must have run before the statement can; a submodule does not need its package to be through."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    submodules = {f"{node.module}.{alias.name}" for alias in node.names} & set(sources)
    yield from submodules
    if len(submodules) < len(node.names):
        yield node.module or ""


def module_name(path: Path) -> str:
    """Dotted name of a file given relative to the repository."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
