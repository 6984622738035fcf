"""What makes an object a policy, and which modules a callable one chooses.

A policy is either an object with ``_run_policy(root_module, ignored_modules, root_kwargs) -> {module: kwargs}``, asked
once about the whole tree, or a callable ``(module, recurse, nonwrapped_numel) -> bool``, asked on the way down whether
to descend and on the way up whether to wrap what is left. Both are recognised by what they offer and not by class, so
that torch's own policies work. Those that users find here stand in ``fsdp_ref.wrap``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from torch import nn

WrapFunction = Callable[..., bool]


@runtime_checkable
class PolicyObject(Protocol):
    """What makes an object a policy; torch's policies satisfy it too."""

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]: ...


def choose_by_function(
    root: nn.Module,
    policy: WrapFunction,
    ignored_modules: frozenset[nn.Module],
    ignored_params: frozenset[nn.Parameter],
) -> list[nn.Module]:
    """Ask a callable policy about every module below ``root``; return those to wrap, children before parents.

    Elements that are in a unit below a module do not count for the module itself. Tied parameters
    count once; a module that occurs twice is asked once.
    """
    chosen: list[nn.Module] = []
    wrapped: set[nn.Parameter] = set()
    asked: set[nn.Module] = {root}

    def visit(module: nn.Module) -> None:
        params = {param for param in module.parameters() if param not in ignored_params}
        total = sum(param.numel() for param in params)
        if not policy(module=module, recurse=True, nonwrapped_numel=total):
            return
        for child in module.children():
            if child not in asked and child not in ignored_modules:
                asked.add(child)
                visit(child)
        rest = sum(param.numel() for param in params - wrapped)
        if module is not root and policy(module=module, recurse=False, nonwrapped_numel=rest):
            chosen.append(module)
            wrapped.update(params)

    visit(root)
    return chosen
