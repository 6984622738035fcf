"""The mark that a composable API leaves on a module without changing it.

``contract()`` turns a function that takes a module into an API: it makes one state per application, registers it on the
module in order of application, and proves afterwards that no parameter, buffer or module changed its name.
Source: ``torch.distributed._composable.contract`` for the behaviour.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Generic, ParamSpec, Protocol, TypeVar, cast

from torch import nn

from fsdp_ref.annotations import register, registry_of, unregister, walk
from fsdp_ref.errors import AlreadyAppliedError, FsdpTypeError, ModifiedFqnsError, listing
from fsdp_ref.naming import join_fqn

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


class ContractState:
    """Default state of an API that needs none of its own."""


class ComposableApi(Protocol, Generic[P, R_co]):
    """A function made composable: call it with a module, ask it for the state it left."""

    __name__: str

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    def state(self, module: nn.Module) -> Any:
        """Return the state that the API left on ``module``; None when it was not applied."""


def contract(state_cls: Callable[[], Any] = ContractState) -> Callable[[Callable[P, R_co]], ComposableApi[P, R_co]]:
    """Return a decorator that makes ``func(module, ...)`` a composable API.

    The function may take a list of modules; they share one state. It returns the module (or as many modules), or None
    for "the same". It finds its state with ``func.state(module)`` while it runs.

    Raises (by the decorated function):
        AlreadyAppliedError: the API was applied to one of the modules before.
        ModifiedFqnsError: names of parameters, buffers or modules changed, or their order did.
        FsdpTypeError: not a module or a list of modules.
    """

    def decorate(func: Callable[P, R_co]) -> ComposableApi[P, R_co]:
        name = func.__name__
        first = next(iter(inspect.signature(func).parameters), "module")

        @functools.wraps(func)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R_co:
            given = args[0] if args else kwargs.get(first)
            modules = _as_list(given, name)
            _register_all(modules, name, state_cls())
            before = [_names(each, name) for each in modules]
            try:
                result = func(*args, **kwargs)
            except BaseException:
                # A refused application must leave the modules free for a corrected one.
                for each in modules:
                    unregister(each, name)
                raise
            updated = modules if result is None else _as_list(result, name)
            _check_names(name, before, [_names(each, name) for each in updated])
            for old, new in zip(modules, updated, strict=True):
                if new is not old:
                    register(new, name, (registry_of(old) or {})[name])
            return cast("R_co", given) if result is None else result

        wrapper.state = lambda module: (registry_of(module) or {}).get(name)  # type: ignore[attr-defined]  # a function with a method
        return cast("ComposableApi[P, R_co]", wrapper)

    return decorate


def check_one_module(api: str, module: object) -> None:
    """Refuse anything but a single module; a list of modules would have to become one unit.

    Raises:
        FsdpTypeError: not a module.
    """
    if not isinstance(module, nn.Module):
        raise FsdpTypeError(
            f"{api}: expected one module, got a {type(module).__name__}. Apply it to each module, or to one around them."
        )


_get_registry = registry_of
"""Torch's name of it."""

Names = tuple[list[str], list[str], list[str]]
_KINDS: Final = ("parameters", "buffers", "modules")


def _as_list(module: Any, name: str) -> list[nn.Module]:
    several = isinstance(module, Sequence) and not isinstance(module, (str, nn.Module))
    modules: list[Any] = list(module) if several else [module]
    bad = sorted({type(each).__name__ for each in modules if not isinstance(each, nn.Module)})
    if bad or not modules:
        raise FsdpTypeError(
            f"{name}: expected a module or a list of modules, got {listing(bad) or 'an empty list'}. "
            "Pass nn.Module objects."
        )
    return modules


def _register_all(modules: Iterable[nn.Module], name: str, state: object) -> None:
    taken = [type(each).__name__ for each in modules if name in (registry_of(each) or {})]
    if taken:
        raise AlreadyAppliedError(
            f"{name} has already been applied to the following module: {listing(taken)}. "
            "Apply each API once per module."
        )
    for each in modules:
        register(each, name, state)


def _names(module: nn.Module, api: str) -> Names:
    """Return the names below ``module``, of each module once; not below those that have had the API already."""
    parameters, buffers, modules = dict[Any, str](), dict[Any, str](), dict[nn.Module, str]()
    for path, each in walk(module, lambda below: api in (registry_of(below) or {})):
        if each in modules:
            continue
        modules[each] = path
        for found, own in ((parameters, each._parameters), (buffers, each._buffers)):
            for name, tensor in own.items():
                if tensor is not None:
                    found.setdefault(tensor, join_fqn(path, name))
    return list(parameters.values()), list(buffers.values()), list(modules.values())


def _check_names(name: str, before: list[Names], after: list[Names]) -> None:
    problems: list[str] = []
    if len(before) != len(after):
        problems.append(f"Checking modules: {len(before)} modules were given and {len(after)} returned")
    for old, new in zip(before, after):
        for kind, had, has in zip(_KINDS, old, new, strict=True):
            if had != has:
                lost = [fqn for fqn in had if fqn not in set(has)]
                gained = [fqn for fqn in has if fqn not in set(had)]
                what = f"only before: {lost}, only after: {gained}" if lost or gained else f"order {had} became {has}"
                problems.append(
                    f"Checking {kind}: Composable distributed API implementations cannot modify FQNs. {name}: {what}"
                )
    if problems:
        raise ModifiedFqnsError("; ".join(problems))
