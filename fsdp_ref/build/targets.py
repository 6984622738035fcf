"""The modules that a policy makes units, with the options of each.

A policy is either an object with ``_run_policy(root_module, ignored_modules, root_kwargs) -> {module: kwargs}``, asked
once about the whole tree, or a callable ``(module, recurse, nonwrapped_numel) -> bool``, asked on the way down whether
to descend and on the way up whether to wrap what is left. Both are recognised by their methods and not by class, so that
torch's own policies work. Modules that mixed precision leaves in full precision are added, and existing units are removed. This
module only decides; it changes nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from fsdp_ref.annotations import unit_of, units_under
from fsdp_ref.config import coerce_mixed_precision
from fsdp_ref.errors import FsdpTypeError, FsdpValueError, listing

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from fsdp_ref.build.ignored import Ignored

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


@dataclass(frozen=True, slots=True)
class Targets:
    """The modules below a root that become units, each with its options.

    Attributes:
        options: module -> keyword arguments of its unit.
        full_precision: those that are units because mixed precision leaves their class alone; their inputs are cast
            up and their outputs back down.
        by_object: whether a policy object chose them (its choice is checked for frozen parameters).
    """

    options: dict[nn.Module, dict[str, Any]] = field(default_factory=dict)
    full_precision: frozenset[nn.Module] = frozenset()
    by_object: bool = False


def choose_targets(
    root: nn.Module,
    policy: PolicyObject | WrapFunction | None,
    options: Mapping[str, Any],
    ignored: Ignored,
    *,
    may_hold_units: bool = False,
) -> Targets:
    """Run ``policy`` over the tree of ``root``.

    Args:
        root: the module that the API is applied to; it is a unit whatever the policy says and is not in the result.
        policy: a policy object, a callable policy, or None for no nested units.
        options: the root's keyword arguments, which nested units inherit.
        ignored: what no unit may take.
        may_hold_units: units that are already below ``root`` are kept (they win over the policy) instead of refused.

    Raises:
        FsdpTypeError: ``policy`` is neither kind.
        FsdpValueError: units below ``root`` where they are refused, or a policy that contradicts one of them.
    """
    if policy is None:
        return Targets()
    if not isinstance(policy, PolicyObject) and not callable(policy):
        raise FsdpTypeError(
            f"auto_wrap_policy: expected a policy object or a callable, got {type(policy).__name__}. "
            "Pass for example ModuleWrapPolicy({Block})."
        )
    manual = units_under(root)
    if manual and not may_hold_units:
        raise FsdpValueError(
            "FSDP auto wrapping requires modules to not already have FSDP applied but found "
            f"{listing(name or 'the root itself' for name, _, _ in manual)} in {type(root).__name__}. "
            "Wrap by hand or by policy, or use fully_shard, which takes both."
        )
    if isinstance(policy, PolicyObject):
        chosen = dict(policy._run_policy(root, set(ignored.modules), dict(options)))
    else:
        modules = choose_by_function(root, policy, ignored.modules, ignored.params)
        chosen = {module: dict(options) for module in modules}
    full = _full_precision(root, options.get("mixed_precision"), ignored)
    for module in full:
        # A module that the policy did not choose starts from the root's options.
        chosen.setdefault(module, dict(options))["mixed_precision"] = None
    chosen = {module: kwargs for module, kwargs in chosen.items() if module is not root}
    if manual:
        chosen = _without_manual(root, chosen, options)
    return Targets(chosen, frozenset(full), isinstance(policy, PolicyObject))


def _full_precision(root: nn.Module, mixed_precision: object, ignored: Ignored) -> list[nn.Module]:
    classes = () if mixed_precision is None else coerce_mixed_precision(mixed_precision)._module_classes_to_ignore
    found = [m for m in root.modules() if classes and isinstance(m, classes) and m not in ignored.modules]
    if found:
        warnings.warn(
            "Both mixed precision and an auto_wrap_policy were specified to FSDP, where the wrapped module has "
            f"submodules of type: {listing(sorted({type(m).__name__ for m in found}))}. "
            "These modules will be wrapped as separate FSDP units with mixed precision disabled.",
            UserWarning,
            stacklevel=4,
        )
    return found


def _without_manual(
    root: nn.Module, chosen: dict[nn.Module, dict[str, Any]], options: Mapping[str, Any]
) -> dict[nn.Module, dict[str, Any]]:
    """Drop targets that already are units; refuse those that contradict one.

    A unit that was made by hand keeps its own settings. It is ambiguous, and refused, when the policy gives such a
    module options of its own, or chooses a module whose parameters belong to a manual unit above it.
    """
    names = {module: name for name, module in root.named_modules()}
    inside: dict[nn.Module, str] = {}
    for name, module, _ in units_under(root):
        for child in module.modules():
            if child is not module and unit_of(child) is None:
                inside.setdefault(child, name)
    problems = [f"{names[m]} (chosen by the policy, inside the unit {inside[m]})" for m in chosen if m in inside] + [
        f"{names[m]} (already a unit, with options of its own in the policy)"
        for m, kwargs in chosen.items()
        if unit_of(m) is not None and any(kwargs.get(key) is not value for key, value in options.items())
    ]
    if problems:
        raise FsdpValueError(
            f"fully_shard: expected a policy that agrees with the units made by hand, got {listing(problems)}. "
            "Leave these modules to one of the two."
        )
    return {module: kwargs for module, kwargs in chosen.items() if unit_of(module) is None}
