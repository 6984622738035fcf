"""Lists names in the source tree that their owner calls private: torch's, pytest's, Python's.

Applied by `tests/arch`, like the rules of `tree_rules`; files that may do so stand in ci/architecture.toml with a reason.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from tree_rules import Function, Offence, imported_modules, is_below, is_stored_attribute

# Names with an underscore that are documented, or that typeshed and argparse give no other name.
NOT_PRIVATE = frozenset(
    {"_exit", "_getframe", "_fields", "_replace", "_asdict", "_SubParsersAction", "_ActionsContainer"}
)


def private_offences(path: str, source: str, ours: frozenset[str]) -> Iterator[Offence]:
    """Private names of torch, and private names of any object that this repository does not define.

    Imports and attribute chains are followed through aliases, names in `getattr` and the like count, and so does Python
    source that stands in a string (scripts that are written out). Whose an object is cannot be seen, but a private name
    that nothing here defines is somebody else's.

    Args:
        path: The file, relative to the repository.
        source: Its text.
        ours: What `private_names_defined` found.
    """
    yield from _private_uses(path, ast.parse(source), ours)


def _private_uses(path: str, tree: ast.AST, ours: frozenset[str], line: int | None = None) -> Iterator[Offence]:
    aliases = _torch_aliases(tree)
    for number, module in imported_modules(tree):
        parts = module.split(".")
        if parts[0] == "torch" and any(_is_private(part) for part in parts):
            yield Offence("private", path, line or number, "", f"imports {module}; go through compat.py")
    for node in ast.walk(tree):
        number = line if line is not None else int(getattr(node, "lineno", 1))
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            known = _dotted(node, aliases)
            if known.startswith("torch.") or node.attr not in ours | NOT_PRIVATE:
                yield Offence("private", path, number, "", f"uses {known or ast.unparse(node)}; go through compat.py")
        elif isinstance(node, ast.Call) and _is_private(named := _attribute_named(node)):
            if named not in ours | NOT_PRIVATE:
                yield Offence("private", path, number, "", f"uses {ast.unparse(node)}; go through compat.py")
        elif line is None and isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" in node.value:
            try:
                script = ast.parse(node.value)
            except SyntaxError:
                continue
            yield from _private_uses(path, script, ours, number)


def private_names_defined(sources: Iterable[str]) -> frozenset[str]:
    """Private names of functions, classes, variables, parameters and attributes that the given sources define."""
    found: set[str] = set()
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, Function | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif is_stored_attribute(node) and isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}:  # type: ignore[attr-defined]  # narrowed
                found.add(node.attr)  # type: ignore[attr-defined]  # narrowed
    return frozenset(filter(_is_private, found))


def _torch_aliases(tree: ast.AST) -> dict[str, str]:
    """Names of this file that stand for torch, a module of it or something in it: alias -> dotted name."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                whole = alias.name if alias.asname else alias.name.partition(".")[0]
                found[alias.asname or whole] = whole
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute) and len(node.targets) == 1:
            target = node.targets[0]
            if isinstance(target, ast.Name) and (known := _dotted(node.value, found)):
                found[target.id] = known
    return {name: dotted for name, dotted in found.items() if is_below(dotted, "torch")}


def _dotted(node: ast.expr, aliases: dict[str, str]) -> str:
    """The dotted name that a chain of attributes stands for; empty where it does not begin with an alias."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    root = aliases.get(node.id) if isinstance(node, ast.Name) else None
    return ".".join([root, *reversed(parts)]) if root else ""


def _attribute_named(call: ast.Call) -> str:
    """The attribute that a call of `getattr` and the like names by a constant."""
    if isinstance(call.func, ast.Name) and call.func.id in {"getattr", "hasattr", "setattr", "delattr"}:
        name = call.args[1] if len(call.args) > 1 else None
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            return name.value
    return ""


def _is_private(part: str) -> bool:
    return part.startswith("_") and not part.startswith("__") and part != "_"
