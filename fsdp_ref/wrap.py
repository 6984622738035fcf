"""Wrap policies under torch's module name: ``from fsdp_ref.wrap import ModuleWrapPolicy``.

``build.targets`` says what makes an object a policy. Names and defaults follow ``torch.distributed.fsdp.wrap``.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from torch import nn

from fsdp_ref.build.targets import WrapFunction
from fsdp_ref.errors import FsdpTypeError, FsdpValueError, UnsupportedError

__all__ = [
    "CustomPolicy",
    "LambdaWrapPolicy",
    "ModuleWrapPolicy",
    "Policy",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]


class Policy(ABC):
    """Base of the policies defined here; deriving from it is optional."""

    @abstractmethod
    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        """Return the modules to make units, each with the options of its unit."""


class ModuleWrapPolicy(Policy):
    """Every instance of one of ``module_classes`` becomes a unit with the root's options."""

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self._module_classes = frozenset(module_classes)
        given: frozenset[object] = self._module_classes
        bad = [cls for cls in given if not isinstance(cls, type)]
        if bad:
            raise FsdpTypeError(f"ModuleWrapPolicy: expected module classes, got {bad!r}. Pass classes, not instances.")

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        classes = tuple(self._module_classes)
        # A copy each: an override for one module must not reach its siblings.
        return {
            module: copy.copy(root_kwargs)
            for module in root_module.modules()
            if module not in ignored_modules and isinstance(module, classes)
        }

    def __call__(self, module: nn.Module, recurse: bool, *_args: object, **_kwargs: object) -> bool:
        """Answer as a callable policy: always descend, wrap instances."""
        return recurse or isinstance(module, tuple(self._module_classes))

    def __repr__(self) -> str:
        names = ", ".join(sorted(f"{cls.__module__}.{cls.__qualname__}" for cls in self._module_classes))
        return f"ModuleWrapPolicy({{{names}}})"


class CustomPolicy(Policy):
    """A function decides for each module: False or {} no unit; True the root's options; a dict overrides some.

    Example:
        ``CustomPolicy(lambda m: {"forward_prefetch": True} if m is head else isinstance(m, Block))``
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | dict[str, Any]]) -> None:
        self._lambda_fn = lambda_fn

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: dict[str, Any]
    ) -> dict[nn.Module, dict[str, Any]]:
        targets: dict[nn.Module, dict[str, Any]] = {}
        for name, module in root_module.named_modules():
            if module in ignored_modules:
                continue
            answer = self._lambda_fn(module)
            if not isinstance(answer, (dict, bool)):
                raise FsdpValueError(
                    "CustomPolicy: The lambda_fn passed to CustomPolicy should return False/True or a kwarg dict, "
                    f"but it returned {answer!r} for {name or 'the root'}. Return one of these."
                )
            if answer:
                targets[module] = copy.copy(root_kwargs) | (answer if isinstance(answer, dict) else {})
        return targets


LambdaWrapPolicy = CustomPolicy
"""Older name of :class:`CustomPolicy`."""


def always_wrap_policy(*_args: object, **_kwargs: object) -> bool:
    """Callable policy: every submodule becomes a unit."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """Callable policy: a module becomes a unit if ``lambda_fn`` is true; bind ``lambda_fn`` with ``partial``."""
    del nonwrapped_numel
    return recurse or lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, transformer_layer_cls: Iterable[type[nn.Module]]
) -> bool:
    """Callable policy: instances of the given classes become units."""
    del nonwrapped_numel
    return recurse or isinstance(module, tuple(transformer_layer_cls))


def or_policy(module: nn.Module, recurse: bool, nonwrapped_numel: int, policies: Iterable[WrapFunction]) -> bool:
    """Callable policy: descend or wrap when any of ``policies`` says so."""
    return any(policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel) for policy in policies)


class _SizeBasedPolicy:
    """The callable behind :data:`size_based_auto_wrap_policy`, with its two defaults as attributes.

    It is a class, not a function with attributes, so that the attributes have types.
    """

    EXCLUDE_WRAP_MODULES: set[type[nn.Module]] = {nn.ModuleList, nn.ModuleDict}
    FORCE_LEAF_MODULES: set[type[nn.Module]] = {nn.MultiheadAttention}
    __name__ = "size_based_auto_wrap_policy"

    def __call__(
        self,
        module: nn.Module,
        recurse: bool,
        nonwrapped_numel: int,
        min_num_params: int = int(1e8),
        force_leaf_modules: set[type[nn.Module]] | None = None,
        exclude_wrap_modules: set[type[nn.Module]] | None = None,
    ) -> bool:
        """Wrap a module once its not yet wrapped elements reach ``min_num_params``.

        Args:
            module: the module asked about.
            recurse: True asks whether to descend, False whether to wrap the rest.
            nonwrapped_numel: elements below ``module`` that are in no unit yet.
            min_num_params: the threshold, in elements.
            force_leaf_modules: classes that are never descended into (default ``FORCE_LEAF_MODULES``).
            exclude_wrap_modules: classes that are never wrapped (default ``EXCLUDE_WRAP_MODULES``).
        """
        leaves = self.FORCE_LEAF_MODULES if force_leaf_modules is None else force_leaf_modules
        excluded = self.EXCLUDE_WRAP_MODULES if exclude_wrap_modules is None else exclude_wrap_modules
        return nonwrapped_numel >= min_num_params and not isinstance(module, tuple(leaves if recurse else excluded))


size_based_auto_wrap_policy: Final = _SizeBasedPolicy()
"""Callable policy by size; see its call signature for options."""


_enabled: ContextVar[tuple[Callable[..., nn.Module], dict[str, Any]] | None] = ContextVar("fsdp_ref_wrap", default=None)


@contextmanager
def enable_wrap(*, wrapper_cls: Callable[..., nn.Module], **wrapper_kwargs: Any) -> Iterator[None]:
    """Make :func:`wrap` wrap with ``wrapper_cls`` and ``wrapper_kwargs`` inside the context.

    Raises:
        UnsupportedError: inside another such context.
    """
    if _enabled.get() is not None:
        raise UnsupportedError(
            "enable_wrap: expected no surrounding context, got one that is already within an autowrap context. "
            "Nested contexts are not supported; leave the outer one first."
        )
    token = _enabled.set((wrapper_cls, wrapper_kwargs))
    try:
        yield
    finally:
        _enabled.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Wrap ``module`` inside :func:`enable_wrap` (overrides win); return it unchanged outside."""
    context = _enabled.get()
    if context is None:
        return module
    wrapper_cls, kwargs = context
    return wrapper_cls(module, **{**kwargs, **wrap_overrides})


_FSDPPolicy = Policy
_or_policy = or_policy
