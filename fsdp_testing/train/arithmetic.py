"""Finds what a script computes in Python from a number that it took out of a tensor: it may divide a sum over ranks only there.

It reads the script's source: factors in the same expression, or where the number's name is used. Factors that are names,
lengths and numbers of ranks are evaluated; others are unknown.
"""

from __future__ import annotations

import ast
import linecache
import math
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from types import FrameType

_HOPS = 3
"""How many names a number is followed through."""
_CALLS = {"len", "float", "int", "max", "min", "get_world_size"}
_SAFE = (ast.Constant, ast.Name, ast.Attribute, ast.BinOp, ast.operator, ast.expr_context, ast.Call)
_HOLDERS = (ast.Tuple, ast.List, ast.Dict, ast.IfExp, ast.NamedExpr, ast.BinOp)
_Place = tuple[int | None, int | None, int | None, int | None]
_Factor = tuple[ast.expr, bool]
"""A factor of a number; with True a divisor."""


def carried(frame: FrameType, value: float) -> float | None:
    """Return the factors that Python code applies to a number; None if unknown.

    Args:
        frame: Frame of the code that is taking it.
        value: The number.
    """
    place = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    for factor, divides in _factors(frame.f_code.co_filename, place):
        times = _evaluated(factor, frame)
        if times is None:
            return None
        value = value / times if divides else value * times
    return value


@lru_cache(maxsize=1024)
def _factors(filename: str, place: _Place) -> tuple[_Factor, ...]:
    tree = _parsed(filename)
    if tree is None:
        return ()
    node = next((n for n in ast.walk(tree) if isinstance(n, ast.expr) and _place(n) == place), None)
    return () if node is None else tuple(_followed(tree, node, _HOPS))


@lru_cache(maxsize=64)
def _parsed(filename: str) -> ast.Module | None:
    """Return the source, in which each node knows its parent."""
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):
        return None
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            child.parent = node  # type: ignore[attr-defined]  # ours
    return tree


def _place(node: ast.expr) -> _Place:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def _followed(tree: ast.Module, node: ast.AST, hops: int) -> list[_Factor]:
    """Return the factors of a number, in the order in which they are applied."""
    factors: list[_Factor] = []
    while isinstance(parent := getattr(node, "parent", None), (*_HOLDERS, ast.keyword)):
        if isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Div | ast.Mult):
            is_left = parent.left is node
            if isinstance(parent.op, ast.Div) and not is_left:
                return factors  # it divides something: what comes of that is another number
            factors.append((parent.right if is_left else parent.left, isinstance(parent.op, ast.Div)))
        node = parent
    if isinstance(parent, ast.AugAssign) and isinstance(parent.op, ast.Div | ast.Mult):
        return factors  # it scales something: a gradient, for example
    uses = (
        [
            _of_use(tree, use, hops - 1)
            for name, scope in _names(tree, parent)
            for use in _uses(scope, name)
            if parent is None or not _is_of_another(parent, scope, name, use)
        ]
        if hops
        else []
    )
    return [*factors, *next((found for found in uses if found), [])]


def _of_use(tree: ast.Module, use: ast.AST, hops: int) -> list[_Factor]:
    parent = getattr(use, "parent", None)
    if isinstance(parent, ast.AugAssign) and parent.target is use:
        return [(parent.value, isinstance(parent.op, ast.Div))] if isinstance(parent.op, ast.Div | ast.Mult) else []
    return _followed(tree, use, hops)


def _names(tree: ast.Module, statement: ast.AST | None) -> Iterator[tuple[str, ast.AST]]:
    """Yield the names that a statement gives to its value, and where they are known: variables, attributes, its function."""
    function: ast.AST = statement or tree
    while not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
        function = getattr(function, "parent", tree)
    if isinstance(statement, ast.Return) and not isinstance(function, ast.Module):
        yield f"{function.name}()", tree
    for target in getattr(statement, "targets", None) or [getattr(statement, "target", None)]:
        for part in ast.walk(target) if isinstance(target, ast.expr) else ():
            if isinstance(part, ast.Name | ast.Attribute) and isinstance(part.ctx, ast.Store):
                yield (part.id, function) if isinstance(part, ast.Name) else (part.attr, tree)


def _is_of_another(statement: ast.AST, scope: ast.AST, name: str, use: ast.AST) -> bool:
    """Whether a variable has changed between a statement that sets it and its use.

    It is used within the statement, or set again in between; a use above the statement comes after it in a loop.
    """
    here, first, last = _statement(use), statement.lineno, use.lineno  # type: ignore[attr-defined]  # both have a place
    if isinstance(statement, ast.AugAssign) or here is statement:
        return here is statement
    others = [node for node in ast.walk(scope) if isinstance(node, ast.Name) and node.id == name and _gives(node)]
    lines = [node.lineno for node in others if _statement(node) not in (statement, here)]
    return any(first < line < last if first < last else not last <= line <= first for line in lines)


def _gives(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Store) and not isinstance(_statement(node), ast.AugAssign)


def _statement(node: ast.AST) -> ast.AST:
    while not isinstance(node, ast.stmt):
        node = node.parent  # type: ignore[attr-defined]  # ours
    return node


def _uses(scope: ast.AST, name: str) -> Iterator[ast.AST]:
    for node in ast.walk(scope):
        called = node.func if isinstance(node, ast.Call) else node
        own = getattr(called, "id", getattr(called, "attr", None))
        if own is None or name != (f"{own}()" if isinstance(node, ast.Call) else own):
            continue
        stored = isinstance(getattr(node, "ctx", None), ast.Store)
        if not stored or isinstance(getattr(node, "parent", None), ast.AugAssign):
            yield node


def _evaluated(node: ast.expr, frame: FrameType) -> float | None:
    """Return a factor's current value; None if it is no factor, or its evaluation might have side effects."""
    for part in ast.walk(node):
        if not isinstance(part, _SAFE):
            return None
        if isinstance(part, ast.Call) and getattr(part.func, "attr", getattr(part.func, "id", "")) not in _CALLS:
            return None
    code = compile(ast.Expression(node), "<factor>", "eval")
    here: FrameType | None = frame
    for _ in range(_HOPS):
        if here is None:
            break
        with suppress(Exception):
            value = float(eval(code, here.f_globals, here.f_locals))  # noqa: S307  # names, lengths and numbers of ranks
            return value if math.isfinite(value) and value else None
        here = here.f_back
    return None
