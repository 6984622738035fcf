"""The extension point for parameters that are more than one plain tensor.

A plain tensor of this rank needs no extension. For one that is
more (a part of a tensor that other ranks have other parts of) an extension says how it becomes the plain tensor that is
flattened, how a view of the flat tensor becomes what modules compute with, and what its states are. Tensor parallelism is
built in (``comm.tensor_parallel``); :func:`register_parameter_extension` adds others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class ParameterExtension(ABC):
    """How one parameter is flattened, shown, and saved.

    Attributes:
        shape: its shape in full states, and in forward.
        group: the ranks that have its other parts (a process group; each data-parallel rank has its own group); None if this
            rank has all of it.
        differs: whether the ranks of ``group`` have different parts, instead of equal ones.
    """

    shape: torch.Size
    group: Any = None
    differs: bool = True

    @abstractmethod
    def flatten(self, tensor: Tensor) -> Tensor:
        """Return the plain tensor in a parameter, or in a result of :meth:`unflatten`, on the same memory.

        Raises:
            FsdpError: ``tensor`` is not such a parameter (for example one that a user assigned).
        """

    @abstractmethod
    def unflatten(self, view: Tensor) -> Tensor:
        """Return the differentiable tensor that modules use, on the memory of a view of the flat tensor."""

    def gather(self, local: Tensor) -> Tensor:
        """Return the whole value from this rank's part ``local`` (a parameter, or an entry of an optimizer).

        Collectives:
            Those of the extension, over ``group``. All its ranks must call it for the same entries in the same order.
        """
        return local

    def cut(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole value, without communication, possibly on the same memory."""
        return whole

    def chunk(self, rows: Tensor, mesh: Any, placements: list[Any]) -> Tensor:
        """Return an entry of a sharded state: a DTensor with this rank's rows of its part.

        Args:
            rows: the rows.
            mesh: the mesh of the ranks that have other rows of the same part.
            placements: how they are cut over it.

        Collectives:
            Those of the extension. All ranks of ``mesh`` and ``group`` call it.
        """
        raise NotImplementedError


Factory = Callable[[Tensor, Any], ParameterExtension | None]
"""Called with each parameter and the unit's ``comm.groups.DataParallelGroups``; returns None for other kinds."""

_factories: list[Factory] = []


def register_parameter_extension(factory: Factory) -> Callable[[], None]:
    """Call ``factory`` for the parameters of all later units, before the factories that are registered already.

    Returns:
        A function that unregisters it.
    """
    _factories.insert(0, factory)
    return lambda: _factories.remove(factory)


def has_factories() -> bool:
    """Return whether any factory is registered."""
    return bool(_factories)


def registered_extension(param: Tensor, groups: Any) -> ParameterExtension | None:
    """Return the extension of a parameter from the first factory that gives one."""
    return next((found for factory in _factories if (found := factory(param, groups)) is not None), None)
